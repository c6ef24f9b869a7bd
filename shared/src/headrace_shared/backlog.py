"""How much waits in the queue. Whoever wants to know asks here, since how many consumers a lane has is the queue's own
business."""

from headrace_shared.bus import Bus, QueueDepth
from headrace_shared.messages import Lane
from headrace_shared.subjects import requests_consumer


async def lane_depth(bus: Bus, model: str, lane: Lane) -> QueueDepth:
    """Of all messages of one model and lane. Raises BusError."""
    return await bus.queue_depth(requests_consumer(model, lane))
