"""Whether one more request may join the queue. Pure."""

from enum import Enum
from math import inf
from typing import NamedTuple

from headrace_router.forecast import Estimate

FRESH_SHARE = 0.8
"""The rest of each limit is for clients that were refused and come back when they were told to."""
LEAST_SHARE = 0.5
"""A call that comes for the first time may make the queue at least so long as a share of what it bears itself."""
QUEUED_S = 0.25
"""Who waits less does not queue: whatever its deadline, the queue is not what it would miss it for."""


class QueueLimits(NamedTuple):
    """Of one model, over all routers."""

    max_requests: int
    max_tokens: int
    """Prompt tokens and expected answers."""
    max_wait_s: float
    """Longest time to the first token."""


class Depth(NamedTuple):
    num_requests: int
    num_tokens: float


class Obstacle(Enum):
    FULL = "queue_full"
    WAIT = "wait_too_long"
    DEADLINE = "deadline_unreachable"


class Refusal(NamedTuple):
    obstacle: Obstacle
    expected_s: float
    """Time to the first token, or to the last where that is the obstacle; 0 if not known."""
    free_in_s: float
    """Until the obstacle is gone, if what waits is served and nothing comes."""
    borne_s: float = inf
    """The longest wait that its deadline allows, where that is the obstacle."""


def judge(
    estimate: Estimate | None,
    depth: Depth,
    wanted: Depth,
    limits: QueueLimits,
    *,
    left_s: float,
    margin: float,
    spacing_s: float,
    is_returning: bool,
    others_bear_s: float = inf,
) -> Refusal | None:
    """None: it may come in. `wanted` by this call; `left_s` until its deadline; `margin`: an expected time times
    this is seldom exceeded; `spacing_s`: the fleet begins a request in so many seconds; `others_bear_s`: the longest
    wait that most of those can bear who were told to come back. Were the queue as long as those like it who bear the
    most, they would come in vain."""
    share = 1.0 if is_returning else FRESH_SHARE
    num_over = depth.num_requests + wanted.num_requests - max(1.0, share * limits.max_requests)
    num_tokens_over = depth.num_tokens + wanted.num_tokens - share * limits.max_tokens
    if depth.num_requests and (num_over > 0 or num_tokens_over > 0):
        per_request = (depth.num_tokens + wanted.num_tokens) / (depth.num_requests + wanted.num_requests)
        num_requests = max(num_over, num_tokens_over / max(1.0, per_request))
        return Refusal(Obstacle.FULL, estimate.first_token_s if estimate else 0.0, num_requests * spacing_s)
    if estimate is None or estimate.wait_s < QUEUED_S:
        return None
    over_s = estimate.first_token_s - share * limits.max_wait_s
    if over_s > 0.0:
        return Refusal(Obstacle.WAIT, estimate.first_token_s, over_s)
    # What is allowed to wait is what the answer itself leaves; all of it may turn out longer than expected.
    answer_s = estimate.long_total_s - estimate.first_token_s
    borne_s = max(0.0, left_s - answer_s * margin)
    allowed_s = borne_s if is_returning else share * min(borne_s, max(others_bear_s, LEAST_SHARE * borne_s))
    over_s = estimate.first_token_s * margin - allowed_s
    if over_s > 0.0:
        return Refusal(Obstacle.DEADLINE, estimate.long_total_s, over_s / margin, borne_s)
    return None
