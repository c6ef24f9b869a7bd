"""Families from GGUF files: what their metadata means, and what is refused."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from headrace_shared.errors import ConfigError
from headrace_worker.models.gguf import GgufFile
from headrace_worker.models.gguf_config import gguf_config
from headrace_worker.models.gguf_tensors import GgufTensors
from tests.worker.checkpoints import load_tiny, save_checkpoint
from tests.worker.engine_driver import generate
from tests.worker.families.gguf_files import write_family
from tests.worker.families.variants import GEMMA, LINEAR, YARN, rope
from tests.worker.tiny_gguf import write_gguf

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised while transformers is imported

GEMMA_GGUF: dict[str, Any] = {
    **GEMMA,
    "num_hidden_layers": 7,
    "layer_types": None,
    "query_pre_attn_scalar": 16,
    "rope_parameters": {
        "full_attention": {**LINEAR, "rope_theta": 1_000_000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    },
}
QWEN3: dict[str, Any] = {"family": "Qwen3", "head_dim": 16}
FILES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen2": ("qwen2", {"family": "Qwen2"}, {"rope__freq_base": 10000.0}),
    "qwen2, tied": ("qwen2", {"family": "Qwen2", "tie_word_embeddings": True}, {"rope__freq_base": 10000.0}),
    "qwen3, yarn": (
        "qwen3",
        {**QWEN3, **rope(YARN, 1e6)},
        {
            "attention__key_length": 16,
            "attention__value_length": 16,
            "rope__freq_base": 1e6,
            "rope__scaling__type": "yarn",
            "rope__scaling__factor": 4.0,
            "rope__scaling__original_context_length": 32,
        },
    ),
    "gemma3": (
        "gemma3",
        GEMMA_GGUF,
        {
            "attention__key_length": 16,
            "attention__value_length": 16,
            "attention__sliding_window": 12,
            "rope__freq_base": 1e6,
            "rope__scaling__type": "linear",
            "rope__scaling__factor": 4.0,
        },
    ),
}


@pytest.mark.parametrize(("architecture", "changes", "fields"), FILES.values(), ids=FILES.keys())
def test_a_file_is_the_checkpoint_it_was_made_from(
    tmp_path: Path, architecture: str, changes: dict[str, Any], fields: dict[str, Any]
) -> None:
    model = save_checkpoint(tmp_path, **changes)
    path = tmp_path / "tiny.gguf"
    write_family(path, architecture, model, **fields)
    prompt = torch.randint(3, 160, (31,), generator=torch.Generator().manual_seed(1)).tolist()
    output = generate(load_tiny(path), prompt, 12)
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + output[:-1]])).logits[0]
    assert output == logits[len(prompt) - 1 :].argmax(dim=-1).tolist()


@pytest.mark.parametrize(
    ("architecture", "fields", "words"),
    [
        ("gemma2", {}, "gemma2"),
        ("qwen2", {"expert_count": 8}, r"qwen2\.expert_count"),
        ("gemma3", {"final_logit_softcapping": 30.0}, r"gemma3\.final_logit_softcapping"),
        ("gemma3", {}, r"gemma3\.attention\.sliding_window"),
        ("qwen3", {"rope__scaling__type": "longrope"}, "longrope"),
        ("qwen3", {"rope__scaling__type": "yarn"}, "original_context_length"),
        ("qwen2", {"rope__dimension_count": 4}, r"qwen2\.rope\.dimension_count"),
        ("qwen2", {"attention__value_length": 4}, r"qwen2\.attention\.value_length"),
    ],
)
def test_what_cannot_be_run_faithfully_is_refused(
    tmp_path: Path, architecture: str, fields: dict[str, Any], words: str
) -> None:
    model = save_checkpoint(tmp_path, num_hidden_layers=1)
    path = tmp_path / "odd.gguf"
    write_family(path, architecture, model, **fields)
    with pytest.raises(ConfigError, match=words):
        gguf_config(GgufFile(path))


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_parts_of_tensors_are_what_they_are_in_the_whole(tmp_path: Path, kind: str) -> None:
    quantization = gguf.GGMLQuantizationType[kind]
    values = np.random.default_rng(0).standard_normal((6, 128)).astype(np.float32)
    writer = gguf.GGUFWriter(str(tmp_path / "q.gguf"), "llama")
    writer.add_tensor("t", gguf.quants.quantize(values, quantization), raw_dtype=quantization)
    writer.add_tensor("v", values[0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GgufFile(tmp_path / "q.gguf")
    whole = file.tensor("t")
    for rows, columns in ((range(2, 5), None), (None, range(30, 97)), (range(5, 6), range(64, 128))):
        by_rows = whole if rows is None else whole[rows.start : rows.stop]
        expected = by_rows if columns is None else by_rows[:, columns.start : columns.stop]
        assert torch.equal(file.tensor("t", rows, columns), expected)
    assert torch.equal(file.tensor("v", range(7, 20)), torch.from_numpy(values[0, 7:20]))


def test_rows_of_interleaved_heads_may_begin_anywhere(tmp_path: Path) -> None:
    values = np.arange(48 * 48, dtype=np.float32).reshape(48, 48)
    path = tmp_path / "tiny.gguf"
    write_gguf(path, {"blk.0.attn_q.weight": values, "output_norm.weight": np.ones(48, dtype=np.float32)})
    file = GgufFile(path)
    source = GgufTensors(file, gguf_config(file))
    name = "model.layers.0.self_attn.q_proj.weight"
    whole = source.read(name)
    assert source.shape(name) == (48, 48)
    assert not torch.equal(whole, torch.from_numpy(values))
    for rows in (range(0, 8), range(3, 21), range(47, 48)):
        assert torch.equal(source.read(name, rows, range(5, 9)), whole[rows.start : rows.stop, 5:9])
