"""What an engine keeps of adapters: bounded, nothing evicted, nothing taken from who uses it; and what it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace_shared.messages import SequenceId
from headrace_worker.adapters.bank import AdapterBank
from headrace_worker.adapters.config import AdapterRefused, parse_config
from headrace_worker.adapters.folder import allowed_folder, read_files
from headrace_worker.adapters.store import AdapterStore
from headrace_worker.adapters.weights import AdapterReader, AdapterWeights, adapter_bytes
from headrace_worker.models.checkpoint import open_checkpoint
from tests.worker.adapters.peft_files import ALL, save_adapter
from tests.worker.checkpoints import save_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised while transformers is imported

CONFIG: dict[str, Any] = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}


class Model:
    def __init__(self, folder: Path, **changes: Any) -> None:
        self.model = save_checkpoint(folder / "m", **changes)
        checkpoint = open_checkpoint(folder / "m")
        self.config = checkpoint.config
        self.reader = AdapterReader(
            checkpoint.config,
            checkpoint.source,
            folds_norms=True,
            max_rank=8,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )

    def files(self, folder: Path) -> tuple[bytes, bytes]:
        return read_files(folder, self.reader.max_file_bytes)

    def refusal(self, folder: Path) -> str:
        with pytest.raises(AdapterRefused) as caught:
            self.reader.read(*self.files(folder))
        return str(caught.value)


@pytest.fixture
def tiny(tmp_path: Path) -> Model:
    return Model(tmp_path)


def test_scales() -> None:
    assert parse_config(json.dumps(CONFIG).encode(), 64).scale == 2.0
    assert parse_config(json.dumps(CONFIG | {"use_rslora": True}).encode(), 64).scale == pytest.approx(16 / 8**0.5)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"peft_type": "IA3"}, "IA3"),
        ({"use_dora": True}, "DoRA"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "biases"),
        ({"r": 65}, "--max-lora-rank"),
        ({"r": 0}, "rank"),
        ({"r": True}, "rank"),
        ({"lora_alpha": float("nan")}, "lora_alpha"),
        ({"lora_alpha": None}, "lora_alpha"),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern"),
        ({"target_modules": ["embed_tokens"]}, "embed_tokens"),
        ({"target_modules": ["lm_head"]}, "lm_head"),
        ({"target_modules": [1]}, "target_modules"),
    ],
)
def test_what_it_cannot_serve_it_refuses_by_name(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(AdapterRefused, match=said):
        parse_config(json.dumps(CONFIG | changes).encode(), 64)


@pytest.mark.parametrize("data", [b"", b"[]", b"{", b"\xff", b"[" * 100_000])
def test_a_configuration_that_is_none_is_refused(data: bytes) -> None:
    with pytest.raises(AdapterRefused):
        parse_config(data, 64)


def test_weights_of_another_model_or_kind_are_refused(tiny: Model, tmp_path: Path) -> None:
    folder = save_adapter(tmp_path / "a", tiny.model)
    file = folder / "adapter_model.safetensors"
    whole = load_file(str(file))
    name = "base_model.model.model.layers.0.self_attn.q_proj"

    def refusal_of(**changes: torch.Tensor | None) -> str:
        tensors = {**whole, **{key: value for key, value in changes.items() if value is not None}}
        for key in [key for key, value in changes.items() if value is None]:
            tensors.pop(key)
        save_file(tensors, str(file))
        return tiny.refusal(folder)

    assert "shape" in refusal_of(**{f"{name}.lora_A.weight": torch.zeros(4, 40)})
    assert "only one of the matrices" in refusal_of(**{f"{name}.lora_B.weight": None})
    assert "magnitude" in refusal_of(**{f"{name}.lora_magnitude_vector": torch.ones(3)})
    assert "embed" in refusal_of(**{"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(4, 160)})
    assert "layer 3" in refusal_of(**{f"{name.replace('.0.', '.3.')}.lora_A.weight": torch.zeros(4, 48)})
    assert "finite" in refusal_of(**{f"{name}.lora_A.weight": torch.full((4, 48), float("inf"))})
    assert "type" in refusal_of(**{f"{name}.lora_A.weight": torch.zeros(4, 48, dtype=torch.int64)})
    save_file({}, str(file))
    assert "empty" in tiny.refusal(folder)
    for data in (b"", b"\x00" * 8, b"\xff" * 64, (2**40).to_bytes(8, "little") + b"{}"):
        file.write_bytes(data)
        assert tiny.refusal(folder)


def test_experts_are_refused_and_attention_beside_them_is_not(tmp_path: Path) -> None:
    moe = Model(tmp_path, family="Mixtral", num_local_experts=4, num_experts_per_tok=2, intermediate_size=64)
    attention = save_adapter(tmp_path / "a", moe.model, targets=("q_proj", "o_proj"))
    assert moe.reader.read(*moe.files(attention)).rank == 4
    tensors = load_file(str(attention / "adapter_model.safetensors"))
    tensors["base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"] = torch.zeros(4, 48)
    save_file(tensors, str(attention / "adapter_model.safetensors"))
    assert "experts" in moe.refusal(attention)


def test_its_size_is_known_before_it_is_loaded(tiny: Model, tmp_path: Path) -> None:
    weights = tiny.reader.read(*tiny.files(save_adapter(tmp_path / "a", tiny.model, rank=8, targets=ALL)))
    assert weights.num_bytes == adapter_bytes(tiny.config, 8, 4)
    # What is larger than any that could be served is not even read.
    (tmp_path / "a" / "adapter_model.safetensors").write_bytes(bytes(tiny.reader.max_file_bytes + 1))
    assert "more than" in tiny.refusal(tmp_path / "a")


def test_paths_lead_nowhere_else(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    (root / "team" / "poet").mkdir(parents=True)
    outside.mkdir()
    (root / "link").symlink_to(outside)
    (root / "inner").symlink_to(root / "team")
    (root / "file").write_text("")
    assert allowed_folder(str(root), "team/poet") == (root / "team" / "poet").resolve()
    assert allowed_folder(str(root), "inner/poet") == (root / "team" / "poet").resolve()
    bad = ["", ".", "..", "../outside", "team/../../outside", "link", str(outside), str(root / "team"), "~", "a\0b"]
    for path in [*bad, "team\\poet", "missing", "file", "x" * 5000]:
        with pytest.raises(AdapterRefused):
            allowed_folder(str(root), path)
    with pytest.raises(AdapterRefused, match="--lora-dir"):
        allowed_folder("", "team/poet")


def test_files_that_are_links_or_pipes_are_not_followed(tiny: Model, tmp_path: Path) -> None:
    import os

    folder = save_adapter(tmp_path / "a", tiny.model)
    weights = folder / "adapter_model.safetensors"
    weights.rename(tmp_path / "elsewhere")
    weights.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(AdapterRefused, match="link"):
        tiny.files(folder)
    weights.unlink()
    os.mkfifo(weights)
    with pytest.raises(AdapterRefused, match="no file"):
        tiny.files(folder)


def test_the_bank_is_bounded_and_keeps_what_is_in_use() -> None:
    bank: AdapterBank[str] = AdapterBank(2)
    assert (bank.put("a", "A"), bank.put("b", "B"), bank.is_full) == (0, 1, True)
    assert bank.use(SequenceId(1), "a") and not bank.use(SequenceId(2), "c")
    assert bank.drop("a") is None and bank.is_full and "a" not in bank
    assert bank.weights(0) == "A" and not bank.use(SequenceId(3), "a")
    assert bank.leave(SequenceId(9)) is None
    assert bank.leave(SequenceId(1)) == 0 and not bank.is_full and not bank.is_in_use
    assert bank.drop("b") == 1 and bank.drop("b") is None
    assert bank.put("a", "A again") == 0


def test_a_further_adapter_is_refused_and_none_evicted(tiny: Model, tmp_path: Path) -> None:
    installed: dict[int, AdapterWeights | None] = {}
    store = AdapterStore(tiny.reader, installed.__setitem__, 1)
    first = store.read(str(save_adapter(tmp_path / "a", tiny.model, seed=1)))
    second = store.read(str(save_adapter(tmp_path / "b", tiny.model, seed=2)))
    store.add(first)
    store.add(first)
    with pytest.raises(AdapterRefused, match="--max-loras"):
        store.add(second)
    assert first.digest in store and second.digest not in store
    store.drop(first.digest)
    assert installed == {0: None}
    store.add(second)
    assert installed == {0: second.weights}
