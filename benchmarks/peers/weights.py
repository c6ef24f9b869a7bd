"""The built-in model in the formats that the peers read, made once: a checkpoint folder, and other GGUF types."""

import json
import subprocess
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from headrace_worker.models.checkpoint import open_checkpoint
from headrace_worker.models.config import ModelConfig
from headrace_worker.models.source import find_model

MODEL = "smollm2-135m"


def checkpoint_folder(root: Path) -> Path:
    """config.json, tokenizer and bfloat16 weights: what dequantizing the built-in file gives."""
    folder = root / "checkpoint"
    if (folder / "done").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint = open_checkpoint(find_model(MODEL).path)
    config = checkpoint.config
    names = ["model.embed_tokens.weight", "model.norm.weight"]
    for layer in range(config.num_layers):
        names += [f"model.layers.{layer}.{part}.weight" for part in _LAYER_PARTS]
    tensors = {name: checkpoint.source.read(name).to(torch.bfloat16).contiguous() for name in names}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(_hf_config(config), indent=1))
    (folder / "tokenizer.json").write_bytes(checkpoint.make_card(MODEL, config.context).tokenizer)
    tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "bos_token": "<|im_start|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    (folder / "done").touch()
    return folder


def gguf_file(root: Path, kind: str) -> Path:
    """`kind`: BF16 or Q4_0, requantized by llama.cpp's own tool. Q4_0 is then rounded twice: speed only."""
    path = root / f"smollm2-{kind.lower()}.gguf"
    if path.exists():
        return path
    (tool,) = (root / "llama").rglob("llama-quantize")
    fresh = path.with_suffix(".part")
    command = [str(tool), "--allow-requantize", str(find_model(MODEL).path), str(fresh), kind]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT, timeout=600)
    fresh.rename(path)
    return path


_LAYER_PARTS = (
    "input_layernorm",
    "post_attention_layernorm",
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)


def _hf_config(config: ModelConfig) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_epsilon,
        "rope_theta": config.rope.theta,
        "max_position_embeddings": config.context,
        "tie_word_embeddings": config.ties_embeddings,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
