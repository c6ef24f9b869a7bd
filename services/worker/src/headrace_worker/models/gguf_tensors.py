"""The tensors of a GGUF file as a `TensorSource`: under the names and in the layout of Hugging Face checkpoints."""

from collections.abc import Iterable, Iterator

import torch

from headrace_worker.models.config import ModelConfig
from headrace_worker.models.gguf import GgufFile

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_SANDWICH_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


class GgufTensors:
    def __init__(self, file: GgufFile, config: ModelConfig) -> None:
        self._file = file
        self._head_dim = config.head_dim
        layer_names = _LAYER_NAMES | _SANDWICH_NAMES if config.has_sandwich_norms else _LAYER_NAMES
        self._own_names = dict(_own_names(file.tensors, layer_names))
        # Writers of the other architectures leave heads as they are.
        self._interleaved = ("attn_q", "attn_k") if file.metadata.get("general.architecture") == "llama" else ()

    def __contains__(self, name: str) -> bool:
        return name in self._own_names

    def shape(self, name: str) -> tuple[int, ...]:
        return self._file.tensors[self._own_names[name]].shape

    def read(self, name: str, rows: range | None = None, columns: range | None = None) -> torch.Tensor:
        """float32. Rows of queries and keys must be whole heads."""
        own_name = self._own_names[name]
        if own_name.split(".")[-2] not in self._interleaved:
            return self._file.tensor(own_name, rows, columns)
        # A piece of a head has rows that are elsewhere in the file.
        rows = range(self._file.tensors[own_name].shape[0]) if rows is None else rows
        head_dim = self._head_dim
        whole = range(rows.start // head_dim * head_dim, -(-rows.stop // head_dim) * head_dim)
        ordered = _halves_apart(self._file.tensor(own_name, whole, columns), head_dim)
        return ordered[rows.start - whole.start : rows.stop - whole.start]


def _own_names(names: Iterable[str], layer_names: dict[str, str]) -> Iterator[tuple[str, str]]:
    for name in names:
        if name in _TOP_NAMES:
            yield _TOP_NAMES[name], name
        elif name.startswith("blk.") and name.count(".") == 3:
            _, layer, part, suffix = name.split(".")
            if part in layer_names:
                yield f"model.layers.{layer}.{layer_names[part]}.{suffix}", name


def _halves_apart(tensor: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Files of llama's architecture have the two halves of each rotated head interleaved row by row; here, as in HF,
    one follows the other."""
    rows = tensor.reshape(-1, head_dim // 2, 2, *tensor.shape[1:])
    return rows.transpose(1, 2).reshape(tensor.shape)
