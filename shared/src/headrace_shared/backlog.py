"""How much waits in the queue. Whoever wants to know asks here, since how many consumers a lane has is the queue's own
business."""

from collections.abc import Mapping, Sequence

from headrace_shared.bus import Bus, QueueDepth
from headrace_shared.messages import Lane
from headrace_shared.subjects import REQUESTS, queue_of


async def lane_depths(bus: Bus, model: str) -> dict[Lane, QueueDepth]:
    """Of one model; the broker is asked once. Raises BusError."""
    depths = await bus.queue_depths(REQUESTS)
    return {lane: _lane(depths, model, lane) for lane in Lane}


async def model_depths(bus: Bus, models: Sequence[str]) -> dict[str, QueueDepth]:
    """Of each model, all lanes together; the broker is asked once. Raises BusError."""
    depths = await bus.queue_depths(REQUESTS)
    return {model: _sum([_lane(depths, model, lane) for lane in Lane]) for model in models}


def _lane(depths: Mapping[str, QueueDepth], model: str, lane: Lane) -> QueueDepth:
    own = [depth for name, depth in depths.items() if queue_of(model, lane, name) is not None]
    return _sum(own)


def _sum(depths: Sequence[QueueDepth]) -> QueueDepth:
    return QueueDepth(*(sum(numbers) for numbers in zip(*depths, strict=True))) if depths else QueueDepth(0, 0)
