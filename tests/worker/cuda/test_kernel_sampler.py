"""The sampling kernels under the engine: the same tokens as everywhere else, and a table that grows."""

import pytest

from headrace_worker.cuda.device import HostDevice
from headrace_worker.cuda.kernel_sampler import KernelSampler
from tests.worker.cuda.test_engine import KINDS, World
from tests.worker.cuda.toy import CARD, toy_engine


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
