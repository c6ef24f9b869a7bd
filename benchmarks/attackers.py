"""The process that makes attacks (`tests.e2e.attacks`), in phases, on the machine that it attacks.

It gets only what others leave of the cores: in truth an attacker has his own.
"""

import asyncio
import itertools
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Event
from random import Random
from typing import NamedTuple

import httpx

from tests.e2e.attacks import Attacker, attack

MAX_ATTACKS = 32
"""At a time."""
START_S = 60.0
PAUSE_S = 0.05


class Told:
    """What became of the attacks."""

    def __init__(self) -> None:
        self.statuses: dict[str, Counter[int]] = {}
        """Of each kind."""
        self.num_begun = 0
        """Also those that were not over when their phase was."""
        self.num_left_out = 0
        """As many as may be made at a time were being made."""


class Signals(NamedTuple):
    ready: Event
    attacking: Event
    over: Event


async def attack_until_over(
    signals: Signals, url: str, port: int, rate: float, seed: int, kinds: Sequence[str]
) -> Told:
    """These kinds in turn, so many a second on average, in the phases in which it is told to."""
    told = Told()
    random = Random(seed)
    running: set[asyncio.Task[None]] = set()
    async with httpx.AsyncClient(base_url=url, timeout=30.0, trust_env=False) as client:
        attacker = Attacker(client, port, random)

        async def one(kind: str) -> None:
            told.statuses.setdefault(kind, Counter())[await attack(attacker, kind)] += 1

        turns = itertools.cycle(kinds)
        signals.ready.set()
        while not signals.over.is_set():
            await asyncio.sleep(PAUSE_S)
            due = time.monotonic()
            while signals.attacking.is_set():
                due += random.expovariate(rate)
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                kind = next(turns)
                if len(running) < MAX_ATTACKS:
                    told.num_begun += 1
                    task = asyncio.create_task(one(kind))
                    running.add(task)
                    task.add_done_callback(running.discard)
                else:
                    told.num_left_out += 1
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
    return told


def run_attackers(
    signals: Signals, answers: "Queue[Told]", url: str, port: int, rate: float, seed: int, kinds: Sequence[str]
) -> None:
    """A process."""
    if sys.platform == "linux":
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    else:
        os.nice(19)
    answers.put(asyncio.run(attack_until_over(signals, url, port, rate, seed, kinds)))


class Attackers:
    """The process of theirs."""

    def __init__(self, url: str, port: int, rate: float, seed: int, kinds: Sequence[str]) -> None:
        context = multiprocessing.get_context("spawn")
        self._signals = Signals(context.Event(), context.Event(), context.Event())
        self._answers: Queue[Told] = context.Queue()
        self._process = context.Process(
            target=run_attackers, args=(self._signals, self._answers, url, port, rate, seed, kinds)
        )

    def __enter__(self) -> "Attackers":
        self._process.start()
        if not self._signals.ready.wait(START_S):
            raise TimeoutError("the attackers did not start")
        return self

    def __exit__(self, *_: object) -> None:
        self._signals.over.set()
        self._process.join(10.0)
        if self._process.is_alive():
            self._process.kill()

    @contextmanager
    def attacking(self) -> Iterator[None]:
        self._signals.attacking.set()
        try:
            yield
        finally:
            self._signals.attacking.clear()

    def end(self) -> Told:
        self._signals.over.set()
        return self._answers.get(timeout=60.0)
