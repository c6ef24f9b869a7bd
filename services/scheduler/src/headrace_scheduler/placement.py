"""Which worker a sequence goes to. Pure: candidates in, the choice out."""

from collections.abc import Iterable
from typing import NamedTuple

from headrace_shared.messages import WorkerId

RUNNING_WEIGHT = 4
"""Tokens of prompt that one running sequence counts for: what its decoding costs others while a prompt is computed."""


class Candidate(NamedTuple):
    """A worker that has room for the sequence now."""

    worker_id: WorkerId
    num_cached: int
    """Leading tokens of the sequence that it has computed already."""
    num_uncached: int
    num_backlog: int
    """Tokens admitted before that it has still to compute."""
    num_running: int
    num_free: int
    """Blocks that stay free after the admission."""


def place(candidates: Iterable[Candidate]) -> Candidate | None:
    """The candidate with the least work before the first token; of equals the one with most free blocks, then by id.

    A cached token is a token less to compute, so cache and load are traded in one unit. None without a candidate.
    """
    return min(
        candidates, key=lambda candidate: (cost(candidate), -candidate.num_free, candidate.worker_id), default=None
    )


def cost(candidate: Candidate) -> int:
    """Tokens' worth of work until the sequence's first token: its own, and what comes before it."""
    return candidate.num_uncached + candidate.num_backlog + RUNNING_WEIGHT * candidate.num_running
