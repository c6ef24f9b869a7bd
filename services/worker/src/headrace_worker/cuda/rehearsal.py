"""Iterations of sequences that do not exist: to learn how much memory an iteration takes at most, and to have
everything compiled before the first request."""

from collections.abc import Sequence
from itertools import count

from msgspec.structs import replace

from headrace_shared.codec import pack_ids
from headrace_shared.messages import (
    Admission,
    BlockId,
    Request,
    RequestId,
    RouterId,
    SamplingParams,
    SequenceId,
    StopParams,
)
from headrace_worker.cuda.engine import CudaEngine
from headrace_worker.iteration import MAX_TARGETS, SequenceSlice

_GREEDY = SamplingParams(seed=0, temperature=0.0)
_EVERYTHING = SamplingParams(
    seed=0,
    temperature=1.0,
    top_k=40,
    top_p=0.9,
    min_p=0.01,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    logit_bias={0: 1.0},
    num_logprobs=20,
    num_prompt_logprobs=20,
)
_RANDOM = SamplingParams(seed=0, temperature=1.0)
_FILTERED = SamplingParams(seed=0, temperature=1.0, top_p=0.9)
_IDS = count(-1, -1)
"""No real sequence has a negative id."""


def rehearse(engine: CudaEngine) -> None:
    """Everything happens in the null block, so it may be done at any time, but with nothing in flight."""
    facts = engine.facts
    places = min(facts.max_sequences, facts.tokens_per_iteration)
    longest = max(1, min(facts.tokens_per_iteration - places + 1, facts.context))
    # Embeddings of every token beside all else: as much memory as an iteration ever takes.
    _run(engine, [longest, *([1] * (places - 1))], _EVERYTHING, embeds=True)
    _run(engine, [1] * places, _EVERYTHING)
    # Nothing that comes up later should meet a kernel that is not compiled yet: no way of sampling, size or mixture.
    for sampling in (_GREEDY, _RANDOM, _FILTERED):
        for num_logprobs in (None, 0, 1, 5):
            _run(engine, [1], replace(sampling, num_logprobs=num_logprobs))
    for lengths in ([longest], [min(longest, 17)], [min(longest, 17), 1]):
        _run(engine, lengths[:places], _GREEDY)


def _run(engine: CudaEngine, lengths: Sequence[int], sampling: SamplingParams, *, embeds: bool = False) -> None:
    block_size, null_block = engine.cache.block_size, BlockId(engine.cache.null_block)
    request = Request(
        request_id=RequestId(""),
        router=RouterId(""),
        model="",
        prompt=pack_ids([0]),
        sampling=sampling,
        stop=StopParams(max_tokens=1),
        embeds=embeds,
    )
    slices = []
    for length in lengths:
        blocks = [null_block] * -(-length // block_size)
        sequence_id = SequenceId(next(_IDS))
        engine.add(
            Admission(
                sequence_id=sequence_id,
                request=request,
                choice=0,
                attempt=0,
                block_ids=tuple(blocks),
                copies=((null_block, null_block),),
            )
        )
        targets = [0] * min(length - 1, MAX_TARGETS) if sampling is _EVERYTHING else []
        slices.append(SequenceSlice(sequence_id, 0, length, [0] * length, blocks, True, targets=targets))
    engine.submit(slices)
    engine.collect()
    for piece in slices:
        engine.remove(piece.sequence_id)
