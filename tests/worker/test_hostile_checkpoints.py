"""Checkpoints that were made to do harm: refused with one line, before memory is taken, without running anything."""

import json
import os
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from headrace_shared.errors import ConfigError
from headrace_worker.models.card import card_from_folder
from headrace_worker.models.checkpoint import open_checkpoint
from headrace_worker.models.config import MOST
from headrace_worker.models.foreign_tokenizer import without_code
from headrace_worker.models.hf_config import config_from_hf
from headrace_worker.models.reading import check_weights
from headrace_worker.models.safetensors_header import MAX_HEADER_BYTES, read_header
from headrace_worker.models.weights import SafetensorsFolder
from tests.worker.checkpoints import SIZES, save_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised while transformers is imported

LLAMA: dict[str, Any] = {**SIZES, "architectures": ["LlamaForCausalLM"]}
GEMMA: dict[str, Any] = {**SIZES, "architectures": ["Gemma3ForCausalLM"], "sliding_window": 64}


def entry(kind: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}


def write_safetensors(path: Path, header: bytes, data: bytes = b"", length: int | None = None) -> Path:
    path.write_bytes(struct.pack("<Q", len(header) if length is None else length) + header + data)
    return path


@pytest.mark.parametrize(
    ("entries", "num_bytes"),
    [
        ({"a": entry("F32", [2], 0, 8), "b": entry("F32", [2], 4, 12)}, 12),
        ({"a": entry("F32", [2], 0, 8), "b": entry("F32", [2], 0, 8)}, 8),
        ({"a": entry("F32", [2], 8, 16)}, 16),
        ({"a": entry("F32", [2], 0, 8)}, 16),
        ({"a": entry("F32", [4], 0, 16)}, 8),
        ({"a": entry("F32", [2], 8, 0)}, 8),
        ({"a": entry("F32", [2], -8, 0)}, 8),
        ({"a": entry("F32", [2], 0, 2**64)}, 8),
        ({"a": entry("F32", [3], 0, 8)}, 8),
        ({"a": entry("F16", [2], 0, 8)}, 8),
        ({"a": entry("F32", [-2], 0, 8)}, 8),
        ({"a": entry("F32", [2**62, 2**62], 0, 8)}, 8),
        ({"a": entry("F32", [2**32, 2**32, 2**32, 2], 0, 8)}, 8),
        ({"a": entry("F32", [1] * 9 + [2], 0, 8)}, 8),
        ({"a": entry("F33", [2], 0, 8)}, 8),
        ({"a": {"dtype": "F32", "shape": [2]}}, 8),
        ({"a": {"dtype": "F32", "shape": "2", "data_offsets": [0, 8]}}, 8),
        ({"a": {"dtype": "F32", "shape": [2.5], "data_offsets": [0, 8]}}, 8),
        ({"a": [0, 8]}, 8),
    ],
    ids=str,
)
def test_safetensors_headers_that_lie(tmp_path: Path, entries: dict[str, Any], num_bytes: int) -> None:
    path = write_safetensors(tmp_path / "model.safetensors", json.dumps(entries).encode(), bytes(num_bytes))
    with pytest.raises(ConfigError) as raised:
        read_header(path)
    assert "model.safetensors" in str(raised.value) and len(str(raised.value)) < 600
    with pytest.raises(ConfigError):
        SafetensorsFolder(tmp_path)


@pytest.mark.parametrize(
    "header",
    [b"", b"{", b"[1]", b"[" * 100_000, b'{"a":' * 100_000, b'{"a":{"dtype":' + b"[" * 100_000, b"\xff{}", b"null"],
    ids=lambda header: repr(header[:12]),
)
def test_safetensors_headers_that_are_none(tmp_path: Path, header: bytes) -> None:
    with pytest.raises(ConfigError):
        read_header(write_safetensors(tmp_path / "model.safetensors", header))


@pytest.mark.parametrize("length", [MAX_HEADER_BYTES + 1, 100 << 20, 2**63, 2**64 - 1])
def test_a_header_that_says_it_is_huge_is_not_read(tmp_path: Path, length: int) -> None:
    path = write_safetensors(tmp_path / "model.safetensors", b"{}", length=length)
    os.truncate(path, 200 << 20)  # sparse: the file is as long as it says
    with pytest.raises(ConfigError, match="cannot be"):
        read_header(path)


def test_weights_in_types_that_mean_nothing_alone_are_refused_by_name(tmp_path: Path) -> None:
    save_file({"model.norm.weight": torch.ones(48, dtype=torch.int8)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"model\.norm\.weight is stored as I8"):
        SafetensorsFolder(tmp_path).shape("model.norm.weight")


def test_two_files_with_the_same_tensor_are_refused(tmp_path: Path) -> None:
    for name in ("model.norm.weight", "language_model.model.norm.weight"):
        save_file({name: torch.ones(48)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(ConfigError, match="twice"):
        SafetensorsFolder(tmp_path)


@pytest.mark.parametrize(
    "name",
    ["../x.safetensors", "/etc/passwd", "..", ".", "", "a/b.safetensors", "x\0.safetensors", "pytorch_model.bin"],
)
def test_an_index_can_name_nothing_but_weights_beside_it(tmp_path: Path, name: str) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    with pytest.raises(ConfigError, match=r"outside its folder|no safetensors"):
        SafetensorsFolder(tmp_path)


def test_an_index_may_name_what_no_file_can_be_called(tmp_path: Path) -> None:
    places = {"weight_map": {"model.norm.weight": "x" * 5000 + ".safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(places))
    with pytest.raises(ConfigError, match=r"lacks x{100} "):
        SafetensorsFolder(tmp_path)


def test_a_pipe_in_place_of_a_file_holds_nobody_up(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ConfigError, match="no file"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("base", [LLAMA, GEMMA], ids=["llama", "gemma"])
@pytest.mark.parametrize(
    "changes",
    [
        {"vocab_size": 10**12},
        {"num_hidden_layers": 10**9},
        {"hidden_size": 10**9},
        {"intermediate_size": 2**62},
        {"num_attention_heads": 10**9, "num_key_value_heads": 10**9},
        {"max_position_embeddings": 10**15},
        {"head_dim": 10**9},
        {"vocab_size": float("inf")},
        {"num_hidden_layers": float("inf")},
        {"num_attention_heads": 0},
        {"num_attention_heads": 0, "head_dim": 16},
        {"rms_norm_eps": float("nan")},
        {"rms_norm_eps": 10**400},
        {"sliding_window": -1},
        {"architectures": 7},
        {"architectures": [["LlamaForCausalLM"]]},
        {"architectures": {"a": 1}},
        {"rope_scaling": [1]},
        {"rope_scaling": {"rope_type": ["yarn"]}},
        {"rope_scaling": {"rope_type": "yarn", "factor": float("nan")}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 1e308, "original_max_position_embeddings": 2**40}},
        {"rope_theta": float("nan")},
        {"hidden_size": "1" * 5000},
        {"text_config": {"hidden_size": 10**12, "num_hidden_layers": 10**12}},
    ],
    ids=str,
)
def test_absurd_configurations_are_refused_at_once(base: dict[str, Any], changes: dict[str, Any]) -> None:
    if base is LLAMA and "sliding_window" in changes:
        pytest.skip("the family has none")
    started_at = time.monotonic()
    with pytest.raises(ConfigError) as raised:
        config_from_hf({**base, **changes})
    assert time.monotonic() - started_at < 60.0
    assert len(str(raised.value)) < 400


def test_the_largest_sizes_that_are_let_in_take_no_memory_before_the_weights_are_seen(tmp_path: Path) -> None:
    """Two terabytes of embedding are claimed; the file has four numbers."""
    save_file({"model.norm.weight": torch.ones(4)}, tmp_path / "model.safetensors")
    sizes = {"vocab_size": MOST["vocab_size"], "hidden_size": MOST["hidden_size"], "head_dim": 64}
    config = config_from_hf({**LLAMA, **sizes, "num_hidden_layers": 1})
    with pytest.raises(ConfigError, match="lacks"):
        check_weights(config, SafetensorsFolder(tmp_path))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("generation_config", {"temperature": "hot"}),
        ("generation_config", {"temperature": 1e400}),
        ("generation_config", {"temperature": float("nan")}),
        ("generation_config", {"top_p": 7}),
        ("generation_config", {"top_k": True}),
        ("generation_config", {"top_k": [1]}),
        ("generation_config", {"repetition_penalty": -1}),
        ("tokenizer_config", {"bos_token": "<nobody>", "add_bos_token": True}),
        ("tokenizer_config", {"chat_template": "x" * (2 << 20)}),
    ],
    ids=lambda value: str(value)[:40],
)
def test_defaults_that_no_request_may_have_stop_the_start(tmp_path: Path, name: str, content: dict[str, Any]) -> None:
    save_tokenizer(tmp_path)
    (tmp_path / f"{name}.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError):
        card_from_folder(tmp_path, name="m", vocab_size=160, context=64)


def test_a_card_says_how_long_embeddings_are(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    save_file({"model.norm.weight": torch.ones(48)}, tmp_path / "model.safetensors")
    assert open_checkpoint(tmp_path).make_card("m", 64).hidden_size == LLAMA["hidden_size"]


def test_ends_that_the_model_cannot_say_are_left_out(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    ids = {"eos_token_id": [-1, 2, 160, 2**31, True]}
    (tmp_path / "generation_config.json").write_text(json.dumps(ids))
    assert card_from_folder(tmp_path, name="m", vocab_size=160, context=64).eos_token_ids == (2,)


@pytest.mark.parametrize("name", ["config", "tokenizer_config", "generation_config"])
@pytest.mark.parametrize("text", ["[" * 200_000, '{"a":' * 200_000, '{"a": ' + "1" * 5000 + "}", " " * (9 << 20)])
def test_small_files_that_are_deep_or_large(tmp_path: Path, name: str, text: str) -> None:
    save_tokenizer(tmp_path)
    (tmp_path / f"{name}.json").write_text(text)
    with pytest.raises(ConfigError) as raised:
        card_from_folder(tmp_path, name="m", vocab_size=160, context=64)
    assert len(str(raised.value)) < 500


def test_a_tokenizer_with_an_absurd_id_is_refused(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["model"]["vocab"]["far"] = 2**32 - 1
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="id of"):
        card_from_folder(tmp_path, name="m", vocab_size=160, context=64)


CODE = "from pathlib import Path\nPath({marker!r}).touch()\nclass Evil: pass\nclass Tokenizer: pass\n"
ATTEMPT = "import sys, tests.worker.test_hostile_checkpoints as own; own.attempt(*sys.argv[1:])"


def attempt(*folders: str) -> list[str]:
    """What becomes of opening them."""
    told = []
    for folder in folders:
        try:
            open_checkpoint(Path(folder)).make_card("m", 64)
        except ConfigError as error:
            told.append(str(error))
        else:
            told.append("opened")
    sys.stdout.write("\n".join(told))
    return told


def hostile_folder(folder: Path, marker: Path, *, has_tokenizer: bool) -> Path:
    """Every way in which a configuration can name code, and the code beside it."""
    folder.mkdir()
    names = {f"Auto{kind}": f"evil.{kind}" for kind in ("Config", "Model", "ModelForCausalLM")}
    names["AutoTokenizer"] = ["evil.Tokenizer", "evil.Tokenizer"]  # type: ignore[assignment]  # as in real files
    more = {
        "auto_map": names,
        "trust_remote_code": True,
        "custom_pipelines": {"evil": {"impl": "evil.Evil"}},
        "_name_or_path": str(folder),
    }
    code = CODE.format(marker=str(marker))
    for name in (
        "evil",
        "tokenizer",
        "modeling_llama",
        "configuration_llama",
        "tokenization_evil",
        "conftest",
        "setup",
    ):
        (folder / f"{name}.py").write_text(code)
    (folder / "__init__.py").write_text(code)
    (folder / "pytorch_model.bin").write_bytes(f"cposix\nsystem\n(S'touch {marker}'\ntR.".encode())
    config = {**LLAMA, **more, "model_type": "llama", "text_config": None, "nested": {**more}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({**more, "tokenizer_class": "EvilTokenizer", "init_kwargs": more})
    )
    (folder / "generation_config.json").write_text(json.dumps(more))
    save_file({"model.norm.weight": torch.ones(48)}, folder / "model.safetensors")
    if has_tokenizer:
        save_tokenizer(folder)
    else:
        (folder / "vocab.json").write_text(json.dumps({"a": 0, "b": 1}))
        (folder / "merges.txt").write_text("#version: 0.2\n")
    return folder


@pytest.mark.parametrize("flags", [None, ["-O"]], ids=["here", "without asserts"])
def test_nothing_that_comes_with_a_checkpoint_is_run(tmp_path: Path, flags: list[str] | None) -> None:
    marker = tmp_path / "marker"
    with_tokenizer = hostile_folder(tmp_path / "whole", marker, has_tokenizer=True)
    without = hostile_folder(tmp_path / "converted", marker, has_tokenizer=False)
    if flags is None:
        told = attempt(str(with_tokenizer), str(without))
    else:
        arguments = [sys.executable, *flags, "-W", "ignore", "-c", ATTEMPT, str(with_tokenizer), str(without)]
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=100, input="y\ny\ny\n")
        told = done.stdout.splitlines()
        assert done.returncode == 0, done.stderr
    assert told[0] == "opened" and len(told) == 2 and "\n" not in told[1], told
    assert not marker.exists()


def test_a_folder_with_nothing_but_pickled_weights_is_refused(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    for name in ("pytorch_model.bin", "model.pt", "model.pth"):
        (tmp_path / name).write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(ConfigError, match="may run code"):
        open_checkpoint(tmp_path)


def test_what_names_code_is_taken_out_at_any_depth() -> None:
    hostile = {"auto_map": {"a": "b"}, "text_config": [{"trust_remote_code": True, "x": {"auto_map": 1, "y": 2}}]}
    assert without_code(hostile) == {"text_config": [{"x": {"y": 2}}]}
