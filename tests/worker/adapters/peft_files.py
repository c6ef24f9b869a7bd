"""Random adapters in PEFT's format, and models with such an adapter merged into their weights."""

import copy
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SMOLLM2_135M = {
    f"model.layers.{layer}.{module}": shape
    for layer in range(30)
    for module, shape in {
        "self_attn.q_proj": (576, 576),
        "self_attn.k_proj": (192, 576),
        "self_attn.v_proj": (192, 576),
        "self_attn.o_proj": (576, 576),
        "mlp.gate_proj": (1536, 576),
        "mlp.up_proj": (1536, 576),
        "mlp.down_proj": (576, 1536),
    }.items()
}
"""Its matrices: (outputs, inputs)."""


def save_adapter(
    folder: Path,
    model: Any,
    *,
    rank: int = 4,
    alpha: float = 8.0,
    rslora: bool = False,
    targets: Sequence[str] = ALL,
    seed: int = 0,
    size: float = 0.2,
    **changes: Any,
) -> Path:
    """`changes` go into adapter_config.json."""
    shapes = {
        name: (module.weight.shape[0], module.weight.shape[1])
        for name, module in model.named_modules()
        if name.rpartition(".")[2] in targets
    }
    config = {
        "use_rslora": rslora,
        "target_modules": list(targets),
        "bias": "none",
        "use_dora": False,
        "modules_to_save": None,
    }
    return write_adapter(folder, shapes, rank=rank, alpha=alpha, seed=seed, size=size, **{**config, **changes})


def write_adapter(
    folder: Path,
    shapes: Mapping[str, tuple[int, int]],
    *,
    rank: int,
    alpha: float,
    seed: int,
    size: float,
    **config: Any,
) -> Path:
    """Of matrices of these shapes, (outputs, inputs). The larger `size`, the more it changes what a model says."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, (outputs, inputs) in shapes.items():
        key = f"base_model.model.{name}"
        tensors[f"{key}.lora_A.weight"] = torch.randn((rank, inputs), generator=generator) * size
        tensors[f"{key}.lora_B.weight"] = torch.randn((outputs, rank), generator=generator) * size
    save_file(tensors, str(folder / "adapter_model.safetensors"))
    about = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, **config}
    (folder / "adapter_config.json").write_text(json.dumps(about))
    return folder


def merged(model: Any, folder: Path) -> Any:
    """A copy with W + scale B A in the place of each W."""
    from safetensors.torch import load_file

    config = json.loads((folder / "adapter_config.json").read_text())
    scale = config["lora_alpha"] / (math.sqrt(config["r"]) if config["use_rslora"] else config["r"])
    tensors = load_file(str(folder / "adapter_model.safetensors"))
    changed = copy.deepcopy(model)
    with torch.no_grad():
        for name, module in changed.named_modules():
            a = tensors.get(f"base_model.model.{name}.lora_A.weight")
            if a is not None:
                module.weight += scale * tensors[f"base_model.model.{name}.lora_B.weight"] @ a
    return changed
