"""The attention backend over the Triton kernels."""

import pytest
import torch

from headrace_shared.messages import BlockId, SequenceId
from headrace_worker.attention.backend import AttentionBackend
from headrace_worker.attention.triton import TritonAttention
from headrace_worker.inputs import build_inputs
from headrace_worker.iteration import SequenceSlice
from headrace_worker.kernels import attention_reference
from headrace_worker.kv_cache import KVCache
from tests.worker.kernels.attention_batch import FP8

NUM_LAYERS, NUM_BLOCKS, BLOCK_SIZE, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 2, 40, 16, 4, 2, 16
WINDOWS = (None, 7)
CONTEXTS, COUNTS, NUM_DECODES = [30, 3, 20, 25], [1, 1, 20, 6], 2


class Run:
    """A cache into which a batch's keys and values are written through the backend, then attention in each layer."""

    def __init__(
        self,
        device: torch.device,
        kv_dtype: torch.dtype = torch.float16,
        *,
        batch_invariant: bool = False,
        one_kernel: bool = False,
    ) -> None:
        generator = torch.Generator().manual_seed(3)
        self.cache = KVCache(
            num_layers=NUM_LAYERS,
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            num_kv_heads=NUM_KV_HEADS,
            head_dim=HEAD_DIM,
            dtype=kv_dtype,
            device=device,
        )
        self.attention = TritonAttention(
            self.cache,
            num_heads=NUM_HEADS,
            max_sequences=8,
            max_tokens=64,
            context=64,
            windows=WINDOWS,
            batch_invariant=batch_invariant,
            one_kernel=one_kernel,
        )
        self.context_lengths = torch.tensor(CONTEXTS, dtype=torch.int32, device=device)
        self.query_starts = torch.tensor([0, *COUNTS], dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)
        self.block_tables = torch.randperm(NUM_BLOCKS, generator=generator)[:16].view(4, 4).int().to(device)
        num_tokens = sum(COUNTS)
        shape = (num_tokens, NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM)
        self.qkv = torch.randn(shape, generator=generator).half().to(device)
        for layer in range(NUM_LAYERS):
            for row, context in enumerate(CONTEXTS):
                # Two numbers a token that both caches hold exactly.
                past = (
                    torch.randint(-2, 3, (context, 2 * NUM_KV_HEADS, HEAD_DIM), generator=generator).half().to(device)
                )
                positions = torch.arange(context, device=device)
                self.attention.write(layer, past, self.slots(row, positions))

    def slots(self, row: int, positions: torch.Tensor) -> torch.Tensor:
        return self.block_tables[row, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE

    def attend(self) -> list[torch.Tensor]:
        planned = self.attention.plan(
            self.query_starts,
            self.context_lengths,
            self.block_tables,
            num_decodes=NUM_DECODES,
            num_tokens=self.qkv.shape[0],
        )
        return [planned(layer, self.qkv[:, :NUM_HEADS]) for layer in range(NUM_LAYERS)]

    def check(self, results: list[torch.Tensor]) -> None:
        scales = torch.ones((2, NUM_KV_HEADS), device=self.qkv.device)
        for layer, window in enumerate(WINDOWS):
            expected = attention_reference.attend(
                self.qkv[:, :NUM_HEADS],
                self.cache.pages[layer],
                self.block_tables,
                self.query_starts,
                self.context_lengths,
                scale=HEAD_DIM**-0.5,
                window=window,
                kv_scales=scales,
            )
            torch.testing.assert_close(results[layer].double(), expected.flatten(1), rtol=3e-3, atol=3e-3)


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("kv_dtype", [torch.float16, FP8], ids=str)
def test_decoding_and_chunks_share_an_iteration(
    kv_dtype: torch.dtype, batch_invariant: bool, device: torch.device
) -> None:
    run = Run(device, kv_dtype, batch_invariant=batch_invariant)
    run.check(run.attend())


def test_the_same_plan_serves_other_lengths(device: torch.device) -> None:
    run = Run(device)
    run.attend()
    run.context_lengths.copy_(torch.tensor([12, 29, 20, 25], dtype=torch.int32))
    run.block_tables.copy_(run.block_tables.flip(0))
    run.check(run.attend())


def test_it_is_the_engines_backend(device: torch.device) -> None:
    run = Run(device)
    backend: AttentionBackend = run.attention
    tables = [[BlockId(block) for block in row] for row in run.block_tables.tolist()]
    slices = [
        SequenceSlice(
            SequenceId(row), context - count, count, [0] * count, tables[row][: -(-context // BLOCK_SIZE)], True
        )
        for row, (context, count) in enumerate(zip(CONTEXTS, COUNTS, strict=True))
    ]
    inputs = build_inputs(
        slices,
        block_size=BLOCK_SIZE,
        num_kv_heads=NUM_KV_HEADS,
        null_block=run.cache.null_block,
        gathered_positions=backend.gathered_positions,
        device=device,
    )
    # The batch comes in another order there; each sequence's last row is known.
    expected = run.attend()
    ends = torch.tensor(COUNTS).cumsum(0).tolist()
    order = torch.empty(run.qkv.shape[0], dtype=torch.int64)
    for last, end, count in zip(inputs.sampled_rows.tolist(), ends, COUNTS, strict=True):
        order[last - count + 1 : last + 1] = torch.arange(end - count, end)
    order = order.to(device)
    for layer in range(NUM_LAYERS):
        prepared = backend.prepare(inputs, run.cache)
        assert torch.equal(prepared(layer, run.qkv[order][:, :NUM_HEADS]), expected[layer][order])


def test_with_one_kernel_decoding_gives_the_bits_of_a_chunk(device: torch.device) -> None:
    run = Run(device, one_kernel=True)
    chunk = run.attend()
    first, last = sum(COUNTS[:2]), sum(COUNTS[:3])
    for position in (0, 1, 15, 16, 19):
        planned = run.attention.plan(
            torch.tensor([0, 1], dtype=torch.int32, device=device),
            torch.tensor([position + 1], dtype=torch.int32, device=device),
            run.block_tables[2:3],
            num_decodes=1,
            num_tokens=1,
        )
        row = run.qkv[first:last][position : position + 1, :NUM_HEADS]
        for layer in range(NUM_LAYERS):
            assert torch.equal(planned(layer, row)[0], chunk[layer][first + position])


def test_work_lies_where_it_lay(device: torch.device) -> None:
    """What a CUDA graph has recorded must stay valid."""
    run = Run(device)
    places = []
    for _ in range(2):
        planned = run.attention.plan(
            run.query_starts, run.context_lengths, run.block_tables, num_decodes=2, num_tokens=run.qkv.shape[0]
        )
        places.append([tensor.data_ptr() for work in planned._works.values() for tensor in work])
    assert places[0] == places[1]
