"""Settings of the scheduler."""

from typing import Annotated

from msgspec import Meta

from headrace_shared.common_settings import QueueSettings


class SchedulerSettings(QueueSettings, frozen=True, kw_only=True):
    model: str = "smollm2-135m"
    """Model whose requests are scheduled, as given to its workers."""
    served_name: str = ""
    """Name of the model in the API; empty: derived from the model."""
    prefix_caching: bool = True
    """Keep computed blocks for prompts with the same beginning."""
    horizon_blocks: Annotated[int, Meta(ge=1, le=64)] = 2
    """Blocks that each running sequence is kept ahead."""
    max_waiting: Annotated[int, Meta(ge=1, le=100_000)] = 256
    """Most sequences that wait in this process, but for the first of each queue; the others stay in the queue."""
    max_losses: Annotated[int, Meta(ge=0)] = 8
    """A request that has lost its worker more often than this is given up, whoever is to blame."""
    max_deliveries: Annotated[int, Meta(ge=1)] = 10
    """A request that was taken from the queue more often than this, losses of workers apart, is given up."""
    move_after_s: Annotated[float, Meta(ge=0, le=3600)] = 1.0
    """The sequences of a draining worker are moved to others after so long; shorter ones end where they are."""
    dead_prompts: bool = False
    """Keep the prompts of requests that were given up, so that `headrace dead requeue` can try them again."""
    flight_recorder: bool = True
    """Record all events of this process in the broker's memory, within a bound, for `headrace explain` and `headrace
    replay`. The record holds prompts and answers as token ids."""
    reattach_timeout_s: Annotated[float, Meta(gt=0, le=600)] = 8.0
    """As the routers' setting of this name: a request is cancelled when its router, or its client, was not heard of for
    so long."""
