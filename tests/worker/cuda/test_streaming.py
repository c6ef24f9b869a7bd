"""Weights go to a device shard by shard: the host never holds more than one file of the checkpoint."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

MIB = 1 << 20
HIDDEN, INNER, LAYERS, VOCAB = 512, 2048, 16, 4096
RAW = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}


def save_in_shards(folder: Path) -> tuple[int, int]:
    """A checkpoint with a file for each layer. Returns the bytes of the largest file and of all."""
    weight_map: dict[str, str] = {}

    def save(number: int, shapes: dict[str, tuple[int, ...]]) -> None:
        file = f"model-{number:05}.safetensors"
        save_file({name: torch.ones(shape) for name, shape in shapes.items()}, str(folder / file))
        weight_map.update(dict.fromkeys(shapes, file))

    save(0, {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)})
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        shapes: dict[str, tuple[int, ...]] = {
            f"{prefix}self_attn.{name}_proj.weight": (HIDDEN, HIDDEN) for name in "qkvo"
        }
        shapes |= {f"{prefix}mlp.{name}_proj.weight": (INNER, HIDDEN) for name in ("gate", "up")}
        shapes[f"{prefix}mlp.down_proj.weight"] = (HIDDEN, INNER)
        shapes |= {f"{prefix}{name}_layernorm.weight": (HIDDEN,) for name in ("input", "post_attention")}
        save(layer + 1, shapes)
    (folder / "config.json").write_text(json.dumps(RAW))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    sizes = [file.stat().st_size for file in folder.glob("*.safetensors")]
    return max(sizes), sum(sizes)


@pytest.mark.skipif(sys.platform != "linux", reason="measures by /proc")
def test_host_memory_grows_by_no_more_than_a_shard(tmp_path: Path) -> None:
    largest, total = save_in_shards(tmp_path)
    output = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.worker.cuda.streaming_probe", str(tmp_path)],
        check=True,
        capture_output=True,
        text=True,
        timeout=100,
    ).stdout
    grown, read = (int(number) for number in output.split())
    assert read >= total - MIB, "the probe has read everything"
    assert total - largest > 200 * MIB, "keeping all files mapped would show"
    assert grown <= largest + 32 * MIB, f"{grown / MIB:.0f} MiB for shards of {largest / MIB:.0f} MiB"
