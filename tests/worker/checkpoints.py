"""Tiny random checkpoints, made by transformers in the format of the hub."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from headrace_worker.config import EngineConfig
from headrace_worker.engine import load
from headrace_worker.torch_engine import TorchEngine

VOCAB_SIZE = 160
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def save_checkpoint(
    folder: Path, *, seed: int = 0, shard_size: str = "50MB", family: str = "Llama", **changes: Any
) -> Any:
    """Writes config.json, safetensors and tokenizer.json; returns transformers' model in float32."""
    import transformers

    torch.manual_seed(seed)
    config_class = "Gemma3TextConfig" if family == "Gemma3" else f"{family}Config"
    config = getattr(transformers, config_class)(**{**SIZES, **changes})
    model = getattr(transformers, f"{family}ForCausalLM")(config).to(torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Norm weights of one and biases of zero would hide mistakes in how they are applied.
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif parameter.ndim == 1:
                parameter.normal_(0.0, 0.5)
            else:
                parameter.normal_(0.0, 0.2)
    model.save_pretrained(folder, max_shard_size=shard_size)
    save_tokenizer(folder)
    return model


def save_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({f"t{index}": index for index in range(VOCAB_SIZE)}, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))


def load_tiny(folder: Path, **changes: Any) -> TorchEngine:
    settings: dict[str, Any] = {
        "model": str(folder),
        "device": "cpu",
        "dtype": "float32",
        "num_blocks": 64,
        "block_size": 8,
        "tokens_per_iteration": 32,
        # Threads that wait for each other cost more than they bring at these sizes.
        "num_threads": 1,
    }
    engine = load(EngineConfig(**{**settings, **changes}), lambda what, done, total: None)
    assert isinstance(engine, TorchEngine)
    return engine


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return torch.randint(3, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
