"""The credit protocol on a broker that loses messages: the snapshot on a new epoch repairs every loss."""

import asyncio
import random

import pytest

from headrace_shared.messages import Outcome
from tests.integration.deployment import until
from tests.integration.inprocess import LossyBroker, World
from tests.scripted_engine import expected_output


@pytest.mark.parametrize("seed", range(3))
async def test_every_request_ends_once_and_complete_though_messages_are_lost(seed: int) -> None:
    chance = random.Random(seed)
    async with World.open(loss=0.1, seed=seed) as world:
        scheduler = world.scheduler()
        workers = [world.worker(f"worker-{number}", num_blocks=40, looks_ahead=number) for number in range(2)]
        requests = {}
        scored = {}
        for number in range(40):
            prompt = [chance.randrange(50) for _ in range(chance.randrange(1, 60))]
            num_choices = chance.choice([1, 1, 3])
            wanted = chance.choice([None, 0, 2])
            request_id = await world.submit(
                prompt, max_tokens=60, seed=number, num_choices=num_choices, num_prompt_logprobs=wanted
            )
            requests[request_id] = (prompt, number, num_choices)
            scored[request_id] = [] if wanted is None else [-position / 4 for position in range(1, len(prompt))]
        await world.ended(*requests, timeout_s=60.0)
        await world.until_settled()
        for request_id, (prompt, number, num_choices) in requests.items():
            assert [event.outcome for event in world.endings[request_id]] == [Outcome.FINISHED]
            assert [entry.logprob for entry in world.scores[request_id]] == scored[request_id]
            for choice in range(num_choices):
                assert world.outputs[request_id][choice] == expected_output(prompt, number, choice, 60)
        assert isinstance(world.broker, LossyBroker) and world.broker.num_lost > 10
        # With nothing running the last losses are repaired as well, and every block comes back.
        await until(lambda: all(g.num_free == g.num_blocks for g in scheduler.core.gauges().workers.values()))
        await until(lambda: not any(worker.session.mirror.num_sequences for worker in workers))
        scheduler.core.check_integrity()


async def test_schedulers_and_workers_that_come_and_go_lose_nothing() -> None:
    async with World.open(loss=0.01, seed=9) as world:
        world.scheduler("scheduler-1")
        for number in range(3):
            world.worker(f"worker-{number}", num_blocks=64)
        requests = [await world.submit([number, 5, 6], max_tokens=400, seed=number) for number in range(12)]
        await asyncio.sleep(1.5)
        world.scheduler("scheduler-2")
        await asyncio.sleep(0.5)
        await world.kill("scheduler-1")
        await asyncio.sleep(0.5)
        await world.kill("worker-1")
        world.worker("worker-3", num_blocks=64)
        await world.ended(*requests, timeout_s=60.0)
        await world.until_settled()
        for number, request_id in enumerate(requests):
            assert world.outputs[request_id][0] == expected_output([number, 5, 6], number, 0, 400)
            assert [event.outcome for event in world.endings[request_id]] == [Outcome.FINISHED]
