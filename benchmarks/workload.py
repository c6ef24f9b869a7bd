"""The standard workload: English prompts of 128 and 512 tokens in turn, a fixed number of new tokens, greedy.

Every prompt begins with a number of its own, so that no two share a cached prefix by accident.
"""

import random
from collections.abc import Callable
from pydoc_data.topics import topics
from typing import NamedTuple


class Job(NamedTuple):
    prompt_ids: list[int]
    num_tokens: int
    pause_s: float = 0.0
    """A closed-loop client waits this long before it sends the request."""


def english() -> str:
    """About a megabyte of English prose: the topics of Python's own help."""
    return "\n".join(topics[name] for name in sorted(topics))


def jobs(
    encode: Callable[[str], list[int]], count: int, num_tokens: int = 64, first: int = 0, pause_s: float = 0.0
) -> list[Job]:
    """`encode` turns text into token ids; `first` numbers the nonces, so that two calls can be kept apart. Pauses are
    exponentially distributed with the mean `pause_s`, and the same for the same numbers."""
    text = english()
    made = []
    for number in range(first, first + count):
        length = (128, 512)[number % 2]
        start = (number * 4001) % (len(text) - 6000)
        ids = encode(f"{number}: {text[start : start + 6000]}")
        assert len(ids) >= length, f"{len(ids)} tokens in an excerpt that should give {length}"
        pause = random.Random(number).expovariate(1 / pause_s) if pause_s else 0.0
        made.append(Job(ids[:length], num_tokens, pause))
    return made


def shared_head_jobs(
    encode: Callable[[str], list[int]], count: int, num_tokens: int = 64, first: int = 0, head: int = 400, own: int = 64
) -> list[Job]:
    """Prompts that begin with the same `head` tokens and go on with `own` of their own."""
    text = english()
    shared = encode(f"{first}: {text[:4000]}")[:head]
    made = []
    for number in range(first, first + count):
        start = 10_000 + (number * 4001) % (len(text) - 20_000)
        ids = encode(f" {number}: {text[start : start + 1000]}")
        assert len(shared) == head and len(ids) >= own, (len(shared), len(ids))
        made.append(Job(shared + ids[:own], num_tokens))
    return made
