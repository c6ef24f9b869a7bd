"""What is done to a fleet, kind by kind."""

import asyncio
import itertools
import random
import time
from collections import Counter

from tests.faults.fleet import KINDS, Fleet


async def freeze_in_turn(fleet: Fleet, frozen_s: float, awake_s: float) -> None:
    for kind in KINDS:
        place = fleet.places(kind)[-1]
        await fleet.until_ready(place)
        fleet.freeze(place)
        await asyncio.sleep(frozen_s)
        fleet.resume(place)
        await asyncio.sleep(awake_s)


async def kill_in_turn(
    fleet: Fleet, num_kills: int, seed: int, pause_s: tuple[float, float], within_s: float, num_each: int = 0
) -> Counter[str]:
    """Kinds take turns; one of which only one works is passed over. Returns how many of each kind were killed: at least
    `num_each`, unless that takes four times as long as `within_s`, on a machine where models are slow to load."""
    chance = random.Random(seed)
    killed: Counter[str] = Counter()
    kinds = itertools.cycle(KINDS)
    started_at = time.monotonic()
    while killed.total() < num_kills:
        is_enough = min(killed[kind] for kind in KINDS) >= num_each
        if time.monotonic() - started_at >= (within_s if is_enough else 4 * within_s):
            break
        await asyncio.sleep(chance.uniform(*pause_s))
        kind = next(kinds)
        ready = [place for place in fleet.places(kind) if await fleet.is_ready(place)]
        if len(ready) > 1:
            await fleet.kill(chance.choice(ready))
            killed[kind] += 1
    return killed
