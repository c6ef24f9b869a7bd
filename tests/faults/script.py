"""Jobs for the scripted engine, whose answers need no uninterrupted run to compare with."""

import json
import random
from typing import Any

from tests.faults.fleet import Shape
from tests.faults.jobs import Job

MODEL = "scripted"


def shape(step_s: float = 0.03, **changes: Any) -> Shape:
    """Two of each. Shorter silences than by default, so that a client notices a frozen router soon. Few tokens a
    second: a crowd that cannot keep up with what it reads measures itself."""
    worker = {"step_s": step_s, "num_blocks": 2048, "checks": False, **changes.pop("worker", {})}
    router = {"ping_interval_s": 0.5, **changes.pop("router", {})}
    return Shape(MODEL, engine="tests.scripted_text", worker=worker, router=router, **changes)


def echo_job(nonce: str, num_tokens: int) -> Job:
    body = {"model": MODEL, "prompt": json.dumps({"echo": nonce}), "max_tokens": num_tokens}
    text = (nonce * (num_tokens // len(nonce) + 1))[:num_tokens]
    return Job(body, {0: (text, "length")})


def echo_jobs(num_tokens: tuple[int, int], seed: int = 0, count: int = 32) -> list[Job]:
    chance = random.Random(seed)
    return [echo_job(f"{chance.randrange(16**8):08x}", chance.randint(*num_tokens)) for _ in range(count)]
