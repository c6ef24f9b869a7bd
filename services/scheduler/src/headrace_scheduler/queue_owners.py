"""Which scheduler takes requests from which queue. Pure.

Prompts with the same beginning are in the same queue, and a queue has one owner, so that who has their blocks cached
meets them. All schedulers come to the same answer from the same list of schedulers; while their lists differ, a queue
has two owners, or none and is stolen from, which costs cached blocks and nothing else.
"""

from collections.abc import Sequence
from hashlib import blake2b

STEAL_SHARE = 2
"""An idle scheduler takes every second message that waits in somebody else's queue."""
MAX_STOLEN = 8


def owners(num_queues: int, salt: str, schedulers: Sequence[str]) -> list[str]:
    """Of the queues of one flow, evenly: rendezvous hashing with a bound on how many one gets, so that few queues move
    when a scheduler comes or goes. Empty without schedulers. `salt` makes flows differ."""
    if not schedulers:
        return []
    most = -(-num_queues // len(schedulers))
    left = dict.fromkeys(schedulers, most)
    found = []
    for queue in range(num_queues):
        best = max((name for name, room in left.items() if room), key=lambda name: _score(f"{salt}/{queue}", name))
        left[best] -= 1
        found.append(best)
    return found


def to_steal(num_pending: Sequence[int], room: int) -> tuple[int, int] | None:
    """From which of others' queues, and how many: of the fullest one only, so that few prefixes come to be known in two
    places. None if there is nothing to steal, or no room for it."""
    if room <= 0 or not num_pending or max(num_pending) == 0:
        return None
    fullest = max(range(len(num_pending)), key=lambda position: num_pending[position])
    return fullest, min(room, MAX_STOLEN, -(-num_pending[fullest] // STEAL_SHARE))


def _score(queue: str, scheduler: str) -> bytes:
    return blake2b(f"{queue}\0{scheduler}".encode(), digest_size=8).digest()
