"""What the clients ask for, and what they must get: greedy and seeded answers of the real model, and scripted ones."""

import asyncio
import random
from typing import Any, NamedTuple

from headrace_shared.quantiles import quantile
from tests import prompts
from tests.e2e.api import TEXT
from tests.faults.crowd import Call, Crowd

MODEL = "smollm2-135m"
NUM_PROMPTS = 16


class Job(NamedTuple):
    body: dict[str, Any]
    expected: dict[int, tuple[str, str | None]]
    """Of an uninterrupted run."""
    stall_s: float = 0.0
    """The longest in it."""


def bodies(max_tokens: int) -> list[dict[str, Any]]:
    """Half greedy, half sampled with a seed. They run to the limit, whatever the model says."""
    made = []
    for number, prompt in enumerate(prompts.SHORT[:NUM_PROMPTS]):
        drawn = {"temperature": 0.8, "seed": 100 + number} if number % 2 else {"temperature": 0}
        made.append({"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, **drawn})
    return made


async def uninterrupted(urls: list[str], max_tokens: int) -> list[Job]:
    """Asks for everything once while nothing goes wrong."""
    crowd = Crowd(urls)
    calls = await asyncio.gather(*(crowd.ask(TEXT, body) for body in bodies(max_tokens)))
    for call in calls:
        assert call.is_complete and not call.problem and call.num_connections == 1, call
    return [Job(call.body, call.outcome(), max(call.stalls_s)) for call in calls]


class Verdict(NamedTuple):
    """What a crowd got, against what it should have got."""

    num_calls: int
    num_lost: int
    num_truncated: int
    """Complete by their own account, but shorter than they must be."""
    num_wrong: int
    """Complete, but with other text: tokens repeated, left out or different."""
    num_clean_cuts: int
    num_reconnections: int
    stall_p99_s: float
    stall_max_s: float
    problems: list[str]


def judge(done: list[tuple[Call, Job]]) -> Verdict:
    lost = [call for call, _ in done if call.problem or not call.is_complete]
    wrong = [(call, job) for call, job in done if call not in lost and call.outcome() != job.expected]
    truncated = [(call, job) for call, job in wrong if _is_shorter(call, job)]
    stalls_s = [max(call.stalls_s, default=0.0) for call, _ in done]
    problems = [f"{call.problem or 'incomplete'} after {call.num_connections} connections" for call in lost]
    problems += [f"{call.outcome()} is not {job.expected}" for call, job in wrong]
    return Verdict(
        num_calls=len(done),
        num_lost=len(lost),
        num_truncated=len(truncated),
        num_wrong=len(wrong) - len(truncated),
        num_clean_cuts=sum(call.num_clean_cuts for call, _ in done),
        num_reconnections=sum(call.num_connections - 1 for call, _ in done),
        stall_p99_s=quantile(stalls_s, 0.99) if stalls_s else 0.0,
        stall_max_s=max(stalls_s, default=0.0),
        problems=problems,
    )


def _is_shorter(call: Call, job: Job) -> bool:
    return any(len(call.outcome().get(index, ("", None))[0]) < len(text) for index, (text, _) in job.expected.items())


async def keep_busy(crowd: Crowd, jobs: list[Job], num_clients: int, seed: int, stop: asyncio.Event) -> Verdict:
    """So many clients ask for one thing after the other until `stop`, and finish what they have begun."""
    done: list[tuple[Call, Job]] = []

    async def client(number: int) -> None:
        chance = random.Random(seed * 1000 + number)
        while not stop.is_set():
            job = chance.choice(jobs)
            done.append((await crowd.ask(TEXT, job.body), job))

    await asyncio.gather(*(client(number) for number in range(num_clients)))
    return judge(done)
