"""The queue as tests see it that play a scheduler, or a router."""

from headrace_shared.backlog import lane_depths
from headrace_shared.bus import Bus, QueueDepth
from headrace_shared.messages import Lane
from headrace_shared.subjects import (
    ACK_WAIT_S,
    MAX_ACK_PENDING,
    REQUESTS,
    ConsumerSpec,
    Queue,
    former_consumer,
    num_partitions,
    subject_token,
)


def whole_lane(model: str, lane: Lane) -> ConsumerSpec:
    """All queues of a lane at once. Not beside a real scheduler: the broker lets no two consumers share a subject."""
    subject = f"requests.{subject_token(model)}.{lane}.*"
    return ConsumerSpec(REQUESTS, former_consumer(model, lane), subject, ACK_WAIT_S, MAX_ACK_PENDING)


async def lane_depth(bus: Bus, model: str, lane: Lane) -> QueueDepth:
    return (await lane_depths(bus, model))[lane]


def request_subject(model: str, lane: Lane, partition: int = 0) -> str:
    return Queue(model, lane, 0, partition % num_partitions(lane, 0)).subject
