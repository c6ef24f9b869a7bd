"""Which worker a sequence goes to. Pure: candidates in, the choice and its reasons out."""

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


class Placement(NamedTuple):
    worker_id: WorkerId
    cost: int
    """Tokens' worth of work until the sequence's first token: its own, and what comes before it."""
    num_cached: int
    num_cached_best: int
    """Of the candidate with the longest cached prefix: more than `num_cached` when load outweighed the cache."""
    num_candidates: int


def place(candidates: Iterable[Candidate]) -> Placement | None:
    """The candidate with the least work before the first token; of equals the one with most free blocks, then by id.

    A cached token is a token less to compute, so cache and load are traded in one unit. None without a candidate.
    """
    best: Candidate | None = None
    best_key: tuple[int, int, str] | None = None
    num_candidates = 0
    num_cached_best = 0
    for candidate in candidates:
        num_candidates += 1
        num_cached_best = max(num_cached_best, candidate.num_cached)
        key = (cost(candidate), -candidate.num_free, candidate.worker_id)
        if best_key is None or key < best_key:
            best, best_key = candidate, key
    if best is None or best_key is None:
        return None
    return Placement(best.worker_id, best_key[0], best.num_cached, num_cached_best, num_candidates)


def cost(candidate: Candidate) -> int:
    return candidate.num_uncached + candidate.num_backlog + RUNNING_WEIGHT * candidate.num_running
