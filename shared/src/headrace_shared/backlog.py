"""How much waits in the queue. Whoever wants to know asks here, since how many consumers a lane has is the queue's own
business."""

from headrace_shared.bus import Bus, QueueDepth
from headrace_shared.messages import Lane
from headrace_shared.subjects import REQUESTS, queue_of


async def lane_depth(bus: Bus, model: str, lane: Lane) -> QueueDepth:
    """Of all messages of one model and lane. Raises BusError."""
    depths = await bus.queue_depths(REQUESTS)
    own = [depth for name, depth in depths.items() if queue_of(model, lane, name) is not None]
    return QueueDepth(*(sum(numbers) for numbers in zip(*own, strict=True))) if own else QueueDepth(0, 0)
