"""A model small enough to be followed by hand, on the engine's own paged cache, and an oracle without either.

The logits at a position are a row of a random table; which row depends on every token up to it and where it stands.
So a wrong block, slot, position, source token or row changes what is generated.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from headrace_shared.codec import unpack_ids
from headrace_shared.fleet_messages import ModelCard
from headrace_shared.messages import Admission, TokenLogprobs
from headrace_worker.cuda.device import HostDevice
from headrace_worker.cuda.engine import CudaEngine
from headrace_worker.cuda.forward import DeviceBatch
from headrace_worker.cuda.sampler import DeviceSampler
from headrace_worker.kernels.attention_reference import copy_blocks
from headrace_worker.kv_cache import KVCache
from headrace_worker.pooling import Pooling
from headrace_worker.sampling import Drawn, SamplingState, sample
from tests.worker.cuda.torch_sampler import TorchSampler

VOCAB_SIZE = 64
BLOCK_SIZE = 4
NUM_STATES = 251

CARD = ModelCard(model="toy", tokenizer=b"{}", vocab_size=VOCAB_SIZE, context=0, eos_token_ids=(0,), created=1)
TABLE = torch.randn(NUM_STATES, VOCAB_SIZE, generator=torch.Generator().manual_seed(5)) * 2.0


class ToyForward:
    """A `DeviceForward`. Counts its calls by batch size, since a replay makes none of its own on a real device."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self.num_rows: list[int] = []
        self.num_hidden: list[int] = []

    def __call__(self, batch: DeviceBatch) -> Tensor:
        self.num_rows.append(batch.token_ids.shape[0])
        if batch.hidden is not None:
            self.num_hidden.append(batch.hidden.shape[0])
            batch.hidden.fill_(1.0)
        stored = self._cache.pages[0, :, 0, 0, :, 0]
        stored[batch.kv_slots // BLOCK_SIZE, batch.kv_slots % BLOCK_SIZE] = batch.token_ids.float()
        rows = torch.arange(batch.token_ids.shape[0])
        owners = torch.searchsorted(batch.query_starts[1:].long(), rows, right=True)
        lengths = batch.query_starts[1:] - batch.query_starts[:-1]
        last = batch.query_starts[1:] - 1
        assert torch.equal(batch.positions[last.long()].int() + 1, batch.context_lengths)
        assert (lengths[: batch.num_decodes] == 1).all()
        assert batch.longest_chunk == max([0, *lengths[batch.num_decodes :].tolist()])
        known = stored[batch.block_tables.long()].flatten(1)[owners]
        places = torch.arange(known.shape[1])
        seen = places[None, :] <= batch.positions[:, None]
        states = torch.where(seen, (known + 1) * (places + 7), 0.0).sum(-1).long() % NUM_STATES
        logits = TABLE[states]
        return logits if batch.sampled_rows is None else logits[batch.sampled_rows]


def toy_engine(
    *,
    num_blocks: int = 64,
    context: int = 48,
    max_sequences: int = 6,
    tokens_per_iteration: int = 16,
    batch_sizes: Sequence[int] = (1, 2, 4),
    sampler: DeviceSampler | None = None,
    pooling: Pooling | None = None,
) -> tuple[CudaEngine, ToyForward]:
    cache = KVCache(
        num_layers=1,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        num_kv_heads=1,
        head_dim=2,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    forward = ToyForward(cache)
    engine = CudaEngine(
        forward,
        cache,
        CARD,
        sampler=sampler or TorchSampler(HostDevice(), VOCAB_SIZE),
        copy_blocks=copy_blocks,
        device=HostDevice(),
        context=context,
        max_sequences=max_sequences,
        tokens_per_iteration=tokens_per_iteration,
        dtype=torch.float32,
        pooling=pooling,
    )
    engine.record(batch_sizes, lambda done, total: None)
    return engine, forward


def toy_logits(tokens: Sequence[int]) -> Tensor:
    """[1, VOCAB_SIZE] after these tokens."""
    state = sum((token + 1) * (place + 7) for place, token in enumerate(tokens)) % NUM_STATES
    return TABLE[state : state + 1]


def expected(admission: Admission, num_tokens: int) -> tuple[list[int], list[TokenLogprobs | None]]:
    """What the sequence samples from here on, computed without cache, batch or engine."""
    state = SamplingState(admission, VOCAB_SIZE)
    tokens = [*unpack_ids(admission.request.prompt), *unpack_ids(admission.output)]
    drawn: list[Drawn] = []
    for _ in range(num_tokens):
        drawn += sample(toy_logits(tokens), [state])
        tokens.append(drawn[-1].token)
    return [one.token for one in drawn], [one.logprobs for one in drawn]
