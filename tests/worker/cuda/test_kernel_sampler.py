"""The sampling kernels under the engine: the same tokens as everywhere else, and a table that grows."""

import pytest

from headrace_shared.codec import pack_ids
from headrace_worker.cuda.device import HostDevice
from headrace_worker.cuda.kernel_sampler import KernelSampler
from tests.worker.cuda.toy import CARD, toy_engine
from tests.worker.cuda.world import KINDS, World


def kernel_world(seed: int, *, max_sequences: int = 6) -> tuple[World, KernelSampler]:
    sampler = KernelSampler(HostDevice(), CARD, max_sequences)
    engine, _ = toy_engine(sampler=sampler, max_sequences=max_sequences, batch_sizes=(1, 2, 4))
    return World(engine, seed), sampler


@pytest.mark.parametrize("kind", range(len(KINDS)))
def test_every_way_of_sampling_gives_the_tokens_of_the_reference(kind: int) -> None:
    world, _ = kernel_world(kind)
    numbers = [world.admit([kind, 3, 3], KINDS[kind], max_tokens=5), world.admit([9], KINDS[0], max_tokens=4)]
    world.run()
    for number in numbers:
        world.check(number)


def test_slots_are_used_again_and_grow_with_the_sequences_admitted_ahead() -> None:
    world, sampler = kernel_world(1, max_sequences=2)
    assert sampler._table.num_slots == 3
    numbers = [world.admit([number, number], KINDS[number], max_tokens=3) for number in range(7)]
    assert sampler._table.num_slots == 12
    world.run()
    numbers += [world.admit([number, 1], KINDS[number], max_tokens=2) for number in range(3)]
    world.run()
    for number in numbers:
        world.check(number)
    assert sampler._table.num_slots == 12 and len(sampler._free) == 12


def test_restrictions_and_named_tokens_give_what_they_give_elsewhere() -> None:
    """A neighbour in the batch draws what it would draw alone."""
    world, _ = kernel_world(4)
    plain = world.admit([4, 3, 3], {"temperature": 1.0, "num_logprobs": 2}, max_tokens=8)
    allowed = world.admit([4, 3, 3], {"temperature": 1.0, "allowed_token_ids": pack_ids([3, 40, 63])}, max_tokens=8)
    named = world.admit([9, 9], {"temperature": 0.7, "num_logprobs": 0, "logprob_token_ids": (5, 60, 1)}, max_tokens=5)
    few = {"allowed_token_ids": pack_ids(range(4)), "bad_words": ((0, 1), (2, 2), (3, 1, 0))}
    words = world.admit([8], {"temperature": 1.0, **few}, max_tokens=16)
    world.run()
    world.check(plain)
    world.check(named)
    assert set(world.output(allowed)) <= {3, 40, 63}
    output = world.output(words)
    assert len(output) == 16 and set(output) <= set(range(4))
    for word in ([0, 1], [2, 2], [3, 1, 0]):
        assert all(output[start : start + len(word)] != word for start in range(len(output)))
    row = next(row for row in world.rows[named] if row.logprobs is not None)
    assert row.logprobs is not None and {item.token for item in row.logprobs.top} == {5, 60, 1}
