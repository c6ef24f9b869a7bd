"""An adapter's matrices in the form in which they are applied: for each of a layer's products, what is added to it.

    y = x W^T + scale * (x A^T) B^T        LoRA (Hu et al., 2021)

A layer multiplies four times: queries, keys and values together, the attention's output, gate and up together, and
down. What is multiplied together has a pair of matrices for each part.
"""

import hashlib
import re
from collections.abc import Mapping
from typing import NamedTuple

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from headrace_worker.adapters.config import TARGETS, AdapterConfig, AdapterRefused, parse_config
from headrace_worker.models.config import ModelConfig
from headrace_worker.models.operations import Site
from headrace_worker.models.rotary import neighbours
from headrace_worker.models.weights import TensorSource

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_NAME = re.compile(
    r"base_model\.model\.(?:model\.)?layers\.([0-9]{1,5})\.(?:self_attn|mlp)\.([a-z]+_proj)\.lora_([AB])(?:\.default)?\.weight"
)


PARTS: Mapping[Site, tuple[str, ...]] = {
    Site.QKV: ("q_proj", "k_proj", "v_proj"),
    Site.OUTPUT: ("o_proj",),
    Site.GATE_UP: ("gate_proj", "up_proj"),
    Site.DOWN: ("down_proj",),
}


HEADER_BYTES = 4 << 20
"""Room for the names in a file of weights."""


class SitePair(NamedTuple):
    """What is added to one product. Parts that the adapter does not change are zero."""

    a: Tensor
    """[parts * rank, inputs]"""
    b: tuple[Tensor, ...]
    """Of each part, [its outputs, rank]."""


class AdapterWeights(NamedTuple):
    rank: int
    scale: float
    layers: list[list[SitePair | None]]
    """By layer and `Site`; None: not changed."""

    @property
    def num_bytes(self) -> int:
        pairs = [pair for layer in self.layers for pair in layer if pair is not None]
        return sum(each.nbytes for pair in pairs for each in (pair.a, *pair.b))


def adapter_bytes(config: ModelConfig, rank: int, element_size: int) -> int:
    """Of an adapter that changes everything."""
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    hidden, inner = config.hidden_size, 0 if config.mixture is not None else config.intermediate_size
    widths = 3 * hidden + queries + 2 * keys + queries + hidden
    if inner:
        widths += 2 * hidden + 2 * inner + inner + hidden
    return config.num_layers * rank * widths * element_size


class AdapterReader:
    """Reads adapters of one model. Thread-safe as far as `source` is not read by others meanwhile."""

    def __init__(
        self,
        config: ModelConfig,
        source: TensorSource,
        *,
        folds_norms: bool,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`folds_norms`: the model's matrices come with the weights of the norms before them multiplied in, so that the
        adapter's must, too."""
        self._config = config
        self._source = source
        self._folds_norms = folds_norms
        self._max_rank = max_rank
        self._dtype = dtype
        self._device = device

    @property
    def max_file_bytes(self) -> int:
        """Of weights that could be served."""
        return HEADER_BYTES + adapter_bytes(self._config, self._max_rank, torch.float32.itemsize)

    def read(self, config_data: bytes, data: bytes) -> AdapterWeights:
        """From the contents of both files. Raises AdapterRefused before anything is converted."""
        config = parse_config(config_data, self._max_rank)
        try:
            tensors = safetensors.torch.load(data)
        except (SafetensorError, ValueError, KeyError, TypeError) as error:
            raise AdapterRefused(f"its weights are no safetensors file: {str(error)[:200]}") from error
        found = self._checked(config, tensors)
        layers: list[list[SitePair | None]] = []
        for index in range(self._config.num_layers):
            norms = self._norms(index) if self._folds_norms else {}
            layers.append([self._pair(config.rank, found, index, site, norms.get(site)) for site in Site])
        return AdapterWeights(config.rank, config.scale, layers)

    def _checked(self, config: AdapterConfig, tensors: Mapping[str, Tensor]) -> dict[tuple[int, str, str], Tensor]:
        """By layer, module and matrix."""
        if not tensors:
            raise AdapterRefused("its weights are empty")
        model = self._config
        found: dict[tuple[int, str, str], Tensor] = {}
        for name, tensor in tensors.items():
            match = _NAME.fullmatch(name)
            if match is None or match[2] not in TARGETS:
                raise AdapterRefused(f"its weights hold {name[:128]}, which is not served")
            layer, module, matrix = int(match[1]), match[2], match[3]
            if layer >= model.num_layers:
                raise AdapterRefused(f"it changes layer {layer}, but the model has {model.num_layers}")
            if model.mixture is not None and module in PARTS[Site.GATE_UP] + PARTS[Site.DOWN]:
                raise AdapterRefused(f"it changes {module} of a mixture of experts, which is not served")
            if config.targets is not None and module not in config.targets:
                raise AdapterRefused(f"its weights hold {module}, which its configuration does not name")
            num_outputs, num_inputs = self._shape(module)
            shape = (config.rank, num_inputs) if matrix == "A" else (num_outputs, config.rank)
            if tuple(tensor.shape) != shape:
                raise AdapterRefused(
                    f"{name[:128]} has the shape {tuple(tensor.shape)}, not {shape}: of another model?"
                )
            if tensor.dtype not in _FLOATS:
                raise AdapterRefused(f"{name[:128]} is of the type {tensor.dtype}")
            if not torch.isfinite(tensor).all():
                raise AdapterRefused(f"{name[:128]} holds numbers that are not finite")
            found[layer, module, matrix] = tensor
        for layer, module, matrix in found:
            if (layer, module, "B" if matrix == "A" else "A") not in found:
                raise AdapterRefused(f"layer {layer} has only one of the matrices of {module}")
        return found

    def _shape(self, module: str) -> tuple[int, int]:
        """(outputs, inputs)"""
        model = self._config
        queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
        return {
            "q_proj": (queries, model.hidden_size),
            "k_proj": (keys, model.hidden_size),
            "v_proj": (keys, model.hidden_size),
            "o_proj": (model.hidden_size, queries),
            "gate_proj": (model.intermediate_size, model.hidden_size),
            "up_proj": (model.intermediate_size, model.hidden_size),
            "down_proj": (model.hidden_size, model.intermediate_size),
        }[module]

    def _pair(
        self, rank: int, found: Mapping[tuple[int, str, str], Tensor], layer: int, site: Site, norm: Tensor | None
    ) -> SitePair | None:
        modules = PARTS[site]
        if not any((layer, module, "A") in found for module in modules):
            return None
        a = torch.zeros((len(modules) * rank, self._shape(modules[0])[1]), dtype=torch.float32)
        bs = []
        for index, module in enumerate(modules):
            b = torch.zeros((self._shape(module)[0], rank), dtype=torch.float32)
            if (layer, module, "A") in found:
                a[index * rank : (index + 1) * rank] = found[layer, module, "A"].float()
                b = found[layer, module, "B"].float()
            if module in ("q_proj", "k_proj"):
                b = neighbours(b, self._config.head_dim)
            bs.append(self._placed(b))
        return SitePair(self._placed(a if norm is None else a * norm), tuple(bs))

    def _placed(self, matrix: Tensor) -> Tensor:
        return matrix.to(self._device, self._dtype).contiguous()

    def _norms(self, layer: int) -> dict[Site, Tensor]:
        """Weights of the norms before two of the products, float32."""
        prefix = f"model.layers.{layer}."
        before_mlp = "pre_feedforward_layernorm" if self._config.has_sandwich_norms else "post_attention_layernorm"
        names = {Site.QKV: "input_layernorm", Site.GATE_UP: before_mlp}
        offset = self._config.norm_offset
        return {site: self._source.read(f"{prefix}{name}.weight").float() + offset for site, name in names.items()}


def digest_of(config_data: bytes, data: bytes) -> str:
    """Of an adapter's content."""
    digest = hashlib.sha256(len(config_data).to_bytes(8, "little") + config_data)
    digest.update(data)
    return digest.hexdigest()
