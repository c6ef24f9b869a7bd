"""A Llama-shaped bfloat16 model whose whole forward pass is one call into the kernels."""

import ctypes
import time
import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from headrace_worker.huge_pages import Arena
from headrace_worker.native.attention import HEAD_DIM_STEP, PagedBatch
from headrace_worker.native.checks import check_multiple, check_range, check_tensor
from headrace_worker.native.library import Library, load
from headrace_worker.native.linear import INPUT_STEP, TILE, PackedWeight, pack_weight
from headrace_worker.native.structures import Adapter, AttentionShape, Batch, LayerWeights, Matrix, ModelShape
from headrace_worker.native.team_size import TeamSize

_BF16 = (torch.bfloat16,)


class NativeShape(NamedTuple):
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    block_size: int
    epsilon: float
    scale: float

    def check(self) -> None:
        """ValueError for what the kernels do not take."""
        check_multiple("hidden size", self.hidden_size, INPUT_STEP)
        check_multiple("intermediate size", self.intermediate_size, INPUT_STEP)
        check_multiple("head size", self.head_dim, HEAD_DIM_STEP)
        check_multiple("number of heads", self.num_heads, self.num_kv_heads)


class NativeMatrix(NamedTuple):
    weight: PackedWeight
    bias: Tensor | None
    step: int = 1
    """So many tiles in a row stay with one thread."""


class NativeLayer(NamedTuple):
    """`gate_up` comes from `pack_gate_up`. Weights of the norms, [hidden_size] float32; None: multiplied into the
    matrices that follow them."""

    qkv: NativeMatrix
    output: NativeMatrix
    gate_up: NativeMatrix
    down: NativeMatrix
    attention_norm: Tensor | None = None
    mlp_norm: Tensor | None = None


class NativeAdapter(NamedTuple):
    """What `adapters.py` has packed."""

    structure: Adapter
    kept: tuple[object, ...]
    """What it points to."""


def pack(
    weight: Tensor, bias: Tensor | None, library: Library | None = None, arena: Arena | None = None
) -> NativeMatrix:
    """weight [outputs, inputs], bias [outputs], bfloat16."""
    return with_bias(pack_weight(weight, library, arena), bias)


def pack_gate_up(
    weight: Tensor, bias: Tensor | None, library: Library | None = None, arena: Arena | None = None
) -> NativeMatrix:
    """weight [2 * size, inputs]: gate above up, whose tiles are packed by turns."""
    return pack(by_turns(weight), None if bias is None else by_turns(bias), library, arena)._replace(step=2)


def with_bias(weight: PackedWeight, bias: Tensor | None) -> NativeMatrix:
    """bias [outputs] bfloat16."""
    if bias is not None:
        check_tensor("bias", bias, (weight.num_outputs,), _BF16)
    return NativeMatrix(weight, bias)


def by_turns(rows: Tensor) -> Tensor:
    """[2 * size, ...] -> the same rows, a tile of the first half and one of the second by turns."""
    return rows.view(2, -1, TILE, *rows.shape[1:]).transpose(0, 1).reshape(rows.shape)


class NativeModel:
    """Not thread-safe: its buffers serve one iteration at a time."""

    def __init__(
        self,
        shape: NativeShape,
        layers: Sequence[NativeLayer],
        embedding: Tensor,
        head: NativeMatrix,
        rotations: Tensor,
        pages: Sequence[Tensor],
        library: Library | None = None,
        *,
        norm: Tensor | None = None,
    ) -> None:
        """embedding [vocab_size, hidden_size] bfloat16; rotations [positions, head_dim / 2] complex64; pages: of each
        layer, [blocks, 2, num_kv_heads, block_size, head_dim] bfloat16, whose values only the kernels can read
        (`reference.values_paired`); norm: weight [hidden_size] float32 of the last norm, None: multiplied into the
        head.

        Raises ValueError for what the kernels do not take."""
        shape.check()
        check_tensor("embedding", embedding, (shape.vocab_size, shape.hidden_size), _BF16)
        check_tensor("rotations", rotations, (None, shape.head_dim // 2), (torch.complex64,))
        q_width, kv_width = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        for layer in layers:
            _check_matrix("qkv", layer.qkv, q_width + 2 * kv_width, shape.hidden_size)
            _check_matrix("output", layer.output, shape.hidden_size, q_width)
            _check_matrix("gate_up", layer.gate_up, 2 * shape.intermediate_size, shape.hidden_size)
            _check_matrix("down", layer.down, shape.hidden_size, shape.intermediate_size)
            _check_norm("attention_norm", layer.attention_norm, shape.hidden_size)
            _check_norm("mlp_norm", layer.mlp_norm, shape.hidden_size)
        _check_matrix("head", head, shape.vocab_size, shape.hidden_size)
        _check_norm("norm", norm, shape.hidden_size)
        if len(pages) != len(layers):
            raise ValueError(f"pages of {len(pages)} layers, not {len(layers)}")
        for layer_pages in pages:
            check_tensor("pages", layer_pages, (None, 2, shape.num_kv_heads, shape.block_size, shape.head_dim), _BF16)
        self._shape = shape
        self._num_blocks = min(layer_pages.shape[0] for layer_pages in pages)
        self._num_positions = rotations.shape[0]
        self._adapters: dict[int, NativeAdapter] = {}
        self._kept = (list(layers), embedding, head, norm, rotations, list(pages))
        self._pages = (ctypes.c_void_p * len(pages))(*(layer_pages.data_ptr() for layer_pages in pages))
        functions = (library or load()).functions
        weights = (LayerWeights * len(layers))(*map(_layer, layers))
        structure = ModelShape(
            AttentionShape(shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.block_size, shape.scale),
            shape.hidden_size,
            shape.intermediate_size,
            len(layers),
            shape.epsilon,
            shape.vocab_size,
        )
        self._handle = functions.headrace_model_new(
            ctypes.byref(structure),
            weights,
            embedding.data_ptr(),
            ctypes.byref(_matrix(head)),
            _address(norm),
            rotations.data_ptr(),
        )
        self._run = functions.headrace_model_run
        self._team_size = TeamSize()
        weakref.finalize(self, functions.headrace_model_free, self._handle)

    def set_adapter(self, slot: int, adapter: NativeAdapter | None) -> None:
        """What rows of this slot get from now on."""
        if adapter is None:
            self._adapters.pop(slot, None)
        else:
            self._adapters[slot] = adapter

    def logits(
        self,
        token_ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        sampled_rows: Tensor,
        batch: PagedBatch,
        *,
        adapter_slots: Tensor | None = None,
        hidden_rows: Tensor | None = None,
        hidden: Tensor | None = None,
        tokens: Tensor | None = None,
    ) -> Tensor:
        """One iteration: token_ids, positions [tokens], slots [tokens, 2 * num_kv_heads], sampled_rows [sampled], all
        int64 -> [sampled, vocab_size] float32. `adapter_slots` [tokens] int32: of each row's adapter, below 0 for none.
        `hidden` [hidden rows, hidden_size] float32 is filled with what the head would get of `hidden_rows`, int64.
        `tokens` [sampled] int64 is filled with the first of each row's greatest logits, or -1 where they are not
        finite; then there are no logits: [0, vocab_size].

        Writes the tokens' keys and values. A sequence's results are the same bits whatever else is in the batch and
        however its prompt is cut into chunks. Raises ValueError for what the kernels do not take.
        """
        shape, num_tokens = self._shape, batch.num_rows
        integers = (torch.int64,)
        check_tensor("token_ids", token_ids, (num_tokens,), integers)
        check_tensor("positions", positions, (num_tokens,), integers)
        check_tensor("slots", slots, (num_tokens, 2 * shape.num_kv_heads), integers)
        check_tensor("sampled_rows", sampled_rows, (None,), integers)
        if sampled_rows.shape[0] > num_tokens:
            raise ValueError(f"{sampled_rows.shape[0]} rows are sampled of {num_tokens}")
        check_range("token_ids", token_ids, shape.vocab_size)
        check_range("positions", positions, self._num_positions)
        check_range("sampled_rows", sampled_rows, num_tokens)
        check_range("slots", slots, self._num_blocks * 2 * shape.num_kv_heads * shape.block_size)
        if batch.greatest_block >= self._num_blocks or batch.block_size != shape.block_size:
            raise ValueError("the block table does not fit the pages")
        adapters = None
        if adapter_slots is not None:
            check_tensor("adapter_slots", adapter_slots, (num_tokens,), (torch.int32,))
            adapters = self._adapter_table(adapter_slots)
        num_hidden = 0
        if hidden_rows is not None and hidden is not None:
            num_hidden = hidden_rows.shape[0]
            check_tensor("hidden_rows", hidden_rows, (None,), integers)
            check_range("hidden_rows", hidden_rows, num_tokens)
            check_tensor("hidden", hidden, (num_hidden, shape.hidden_size), (torch.float32,))
        num_sampled = sampled_rows.shape[0]
        if tokens is not None:
            check_tensor("tokens", tokens, (num_sampled,), integers)
        logits = torch.empty((num_sampled if tokens is None else 0, shape.vocab_size), dtype=torch.float32)
        structure = Batch(
            batch.sequences,
            num_tokens,
            token_ids.data_ptr(),
            positions.data_ptr(),
            slots.data_ptr(),
            slots.stride(0),
            num_sampled,
            sampled_rows.data_ptr(),
            _address(adapter_slots),
            None if adapters is None else ctypes.addressof(adapters),
            num_hidden,
            _address(hidden_rows),
            _address(hidden),
            _address(tokens),
        )
        most_threads = torch.get_num_threads()
        num_threads = self._team_size.choose(num_tokens, most_threads)
        started = time.perf_counter()
        self._run(
            self._handle,
            ctypes.byref(structure),
            self._pages,
            logits.data_ptr() if tokens is None else None,
            num_threads,
        )
        self._team_size.observe(num_tokens, most_threads, num_threads, time.perf_counter() - started)
        return logits

    def _adapter_table(self, slots: Tensor) -> "ctypes.Array[ctypes.c_void_p]":
        """Raises ValueError for a slot without an adapter."""
        used = sorted({slot for slot in slots.tolist() if slot >= 0})
        if missing := [slot for slot in used if slot not in self._adapters]:
            raise ValueError(f"there is no adapter in slot {missing[0]}")
        table = (ctypes.c_void_p * (1 + max(used, default=0)))()
        for slot in used:
            table[slot] = ctypes.addressof(self._adapters[slot].structure)
        return table


def _check_matrix(name: str, matrix: NativeMatrix, num_outputs: int, num_inputs: int) -> None:
    have = (matrix.weight.num_outputs, matrix.weight.num_inputs)
    if have != (num_outputs, num_inputs):
        raise ValueError(f"{name} has the shape {have}, not {(num_outputs, num_inputs)}")


def _check_norm(name: str, weight: Tensor | None, size: int) -> None:
    if weight is not None:
        check_tensor(name, weight, (size,), (torch.float32,))


def _layer(layer: NativeLayer) -> LayerWeights:
    matrices = map(_matrix, (layer.qkv, layer.output, layer.gate_up, layer.down))
    return LayerWeights(*matrices, _address(layer.attention_norm), _address(layer.mlp_norm))


def _matrix(matrix: NativeMatrix) -> Matrix:
    weight = matrix.weight
    return Matrix(
        weight.data.data_ptr(), _address(matrix.bias), weight.num_outputs, weight.num_inputs, matrix.step, weight.format
    )


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
