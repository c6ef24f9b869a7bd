"""Attention over pages by the Triton kernels: decoding in pieces of contexts, prompt chunks in tiles of queries.

What kernels read beside the batch lies at places that never change and is computed on the device from the lengths that
are there when the work runs. So an iteration can be recorded in a CUDA graph and replayed for other lengths.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from headrace_worker.inputs import Inputs
from headrace_worker.kernels import attention_decode, attention_prefill
from headrace_worker.kernels.attention_decode import DecodeWork
from headrace_worker.kernels.attention_plan import plan_decode, plan_prefill
from headrace_worker.kernels.attention_tiles import decode_programs
from headrace_worker.kernels.kv_write import write_kv
from headrace_worker.kv_cache import KVCache

FP8 = torch.float8_e4m3fn
ROUNDS = 4
"""Pieces that a place on the device takes one after another: the more, the less is lost to the last ones."""
SHORTEST_FIXED_SPLIT = 512
MOST_PARTIAL_BYTES = 256 << 20
"""Of intermediate results with fixed splits, whose number depends on the context alone."""


class TritonAttention:
    """An `AttentionBackend`. Holds intermediate results, so it serves one iteration at a time (on one stream)."""

    gathered_positions = 0

    def __init__(
        self,
        cache: KVCache,
        *,
        num_heads: int,
        max_sequences: int,
        max_tokens: int,
        context: int,
        scale: float | None = None,
        softcap: float | None = None,
        windows: Sequence[int | None] = (),
        kv_scales: Tensor | None = None,
        batch_invariant: bool = False,
        one_kernel: bool = False,
    ) -> None:
        """max_sequences, max_tokens: of an iteration. scale: of scores; None: 1 / sqrt(head_dim). windows: positions
        that a query sees, by layer; (): all. kv_scales: float32 [layers, 2, num_kv_heads], for an 8-bit cache;
        None: 1. batch_invariant: a sequence's results do not depend on which others decode with it. one_kernel: nor on
        how its prompt came in chunks, what of it was cached and what was computed again after a preemption: decoding
        goes through the kernel of prompts too, which takes longer the fewer and the longer sequences are."""
        at = cache.pages.device
        num_layers = cache.pages.shape[0]
        self._pages = list(cache.pages.unbind(0))
        self._scale = 1.0 / math.sqrt(cache.head_dim) if scale is None else scale
        self._softcap = softcap
        self._windows = list(windows) or [None] * num_layers
        is_fp8 = cache.pages.dtype == FP8
        if is_fp8 and kv_scales is None:
            kv_scales = torch.ones((num_layers, 2, cache.num_kv_heads), device=at)
        self._kv_scales = [None] * num_layers if kv_scales is None else list(kv_scales.unbind(0))
        self._context = context
        self._max_sequences = max_sequences
        self._one_kernel = one_kernel
        self._num_wanted = max(1, ROUNDS * _places(at, cache.head_dim, is_fp8) // cache.num_kv_heads)
        row_bytes = num_heads * (cache.head_dim + 2) * torch.float32.itemsize
        self._fixed_split = _fixed_split(max_sequences, context, row_bytes) if batch_invariant else None
        most = self._most_pieces(max_sequences, None)
        self._work = {
            window: _Lists(
                torch.empty((self._most_pieces(max_sequences, window), 4), dtype=torch.int32, device=at),
                torch.empty(max_sequences + 1, dtype=torch.int32, device=at),
            )
            for window in dict.fromkeys(self._windows)
        }
        self._partials = torch.empty((most, num_heads, cache.head_dim), device=at)
        self._statistics = torch.empty((most, num_heads, 2), device=at)
        self._per_piece = attention_prefill.queries_per_piece(
            num_heads, cache.num_kv_heads, cache.head_dim, cache.pages
        )
        tiles = 1 + max_tokens // self._per_piece + max_sequences
        self._tiles = torch.empty((tiles, 2), dtype=torch.int32, device=at)

    def prepare(self, inputs: Inputs, cache: KVCache) -> "PlannedAttention":
        ragged = inputs.ragged
        counts = ragged.query_starts[1:] - ragged.query_starts[:-1]
        at = cache.pages.device
        return self.plan(
            torch.from_numpy(ragged.query_starts).to(at),
            torch.from_numpy(ragged.context_lengths).to(at),
            torch.from_numpy(ragged.block_table).to(at),
            num_decodes=int((counts == 1).sum()),
            num_tokens=int(ragged.query_starts[-1]),
        )

    def plan(
        self,
        query_starts: Tensor,
        context_lengths: Tensor,
        block_tables: Tensor,
        *,
        num_decodes: int,
        num_tokens: int,
    ) -> "PlannedAttention":
        """Queues the cutting of one iteration's work. All tensors int32, on the device, read there when the work runs.

        query_starts [sequences + 1]: each one's first row, then the number of rows; context_lengths [sequences]:
        positions up to and with the last query, 0 for a row of nobody; block_tables [sequences, blocks], anything
        behind a sequence's last block. num_decodes: sequences with one query; they come first. num_tokens: rows.
        """
        num_sequences = context_lengths.shape[0]
        if self._one_kernel:
            num_decodes = 0
        works: dict[int | None, DecodeWork] = {}
        if num_decodes:
            for window, lists in self._work.items():
                most = self._most_pieces(num_decodes, window)
                works[window] = DecodeWork(
                    lists.pieces[:most],
                    lists.first_pieces[: num_decodes + 1],
                    self._partials[:most],
                    self._statistics[:most],
                )
                plan_decode(
                    context_lengths[:num_decodes],
                    works[window].pieces,
                    works[window].first_pieces,
                    num_wanted=self._num_wanted,
                    max_rows=self._max_sequences,
                    window=window,
                    fixed_split=self._fixed_split,
                )
        num_chunks = num_sequences - num_decodes
        num_tiles = 0
        if num_chunks:
            num_tiles = (num_tokens - num_decodes) // self._per_piece + num_chunks
            plan_prefill(
                query_starts,
                self._tiles,
                first_sequence=num_decodes,
                queries_per_piece=self._per_piece,
                max_sequences=self._max_sequences,
            )
        return PlannedAttention(
            self, works, query_starts, context_lengths, block_tables, num_decodes=num_decodes, num_tiles=num_tiles
        )

    def write(self, layer: int, keys_values: Tensor, slots: Tensor) -> None:
        """keys_values [tokens, 2 * num_kv_heads, head_dim], slots int64 [tokens]; see `kv_write.write_kv`."""
        write_kv(keys_values, slots, self._pages[layer], self._kv_scales[layer])

    def decode(self, layer: int, queries: Tensor, block_tables: Tensor, work: DecodeWork, output: Tensor) -> None:
        attention_decode.attend(
            queries,
            self._pages[layer],
            block_tables,
            work,
            output,
            num_programs=self._num_wanted + queries.shape[0],
            scale=self._scale,
            softcap=self._softcap,
            kv_scales=self._kv_scales[layer],
        )

    def prefill(
        self,
        layer: int,
        queries: Tensor,
        block_tables: Tensor,
        query_starts: Tensor,
        context_lengths: Tensor,
        output: Tensor,
        num_tiles: int,
    ) -> None:
        attention_prefill.attend(
            queries,
            self._pages[layer],
            block_tables,
            query_starts,
            context_lengths,
            self._tiles,
            output,
            num_pieces=num_tiles,
            scale=self._scale,
            window=self._windows[layer],
            softcap=self._softcap,
            kv_scales=self._kv_scales[layer],
        )

    def window(self, layer: int) -> int | None:
        return self._windows[layer]

    def _most_pieces(self, num_rows: int, window: int | None) -> int:
        if self._fixed_split is not None:
            return num_rows * math.ceil(min(self._context, window or self._context) / self._fixed_split)
        return self._num_wanted + num_rows


class _Lists(NamedTuple):
    pieces: Tensor
    first_pieces: Tensor


class PlannedAttention:
    """A `PreparedAttention`, valid until its backend plans again."""

    def __init__(
        self,
        attention: TritonAttention,
        works: dict[int | None, DecodeWork],
        query_starts: Tensor,
        context_lengths: Tensor,
        block_tables: Tensor,
        *,
        num_decodes: int,
        num_tiles: int,
    ) -> None:
        self._attention = attention
        self._works = works
        self._query_starts = query_starts
        self._context_lengths = context_lengths
        self._block_tables = block_tables
        self._num_decodes = num_decodes
        self._num_tiles = num_tiles

    def __call__(self, layer: int, queries: Tensor) -> Tensor:
        """queries [tokens, num_heads, head_dim], rows may lie apart -> [tokens, num_heads * head_dim]."""
        output = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
        singles = slice(0, self._num_decodes)
        if self._num_decodes:
            work = self._works[self._attention.window(layer)]
            self._attention.decode(layer, queries[singles], self._block_tables[singles], work, output[singles])
        if self._num_tiles:
            self._attention.prefill(
                layer,
                queries,
                self._block_tables,
                self._query_starts,
                self._context_lengths,
                output,
                self._num_tiles,
            )
        return output.flatten(1)


def _places(device: torch.device, head_dim: int, is_fp8: bool) -> int:
    """Decode programs that run at the same time."""
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    return multiprocessors * decode_programs(head_dim, is_fp8)


def _fixed_split(max_sequences: int, context: int, row_bytes: int) -> int:
    split = SHORTEST_FIXED_SPLIT
    while split < context and max_sequences * math.ceil(context / split) * row_bytes > MOST_PARTIAL_BYTES:
        split *= 2
    return split
