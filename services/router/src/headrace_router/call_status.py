"""What has become of a call so far, without waiting for its answer."""

from typing import Any

from headrace_router.active_calls import ActiveCalls
from headrace_router.call_record import CallRecord
from headrace_router.model_queue import Place
from headrace_router.queue_reports import fields
from headrace_router.queue_watch import QueueWatch
from headrace_router.submission import read_end, read_log
from headrace_shared.bus import Bus
from headrace_shared.messages import Outcome
from headrace_shared.subjects import REQUESTS

_STATUS_OF_OUTCOME = {Outcome.FINISHED: "completed"}


class CallStatus:
    def __init__(self, bus: Bus, active: ActiveCalls, watch: QueueWatch) -> None:
        self._bus = bus
        self._active = active
        self._watch = watch

    def of_active(self, owner: str, name: str) -> dict[str, Any] | None:
        """Of a call that this router is answering; None if there is none."""
        active = self._active.find(owner, name)
        if active is None:
            return None
        plan, generation = active
        place = generation.place
        status = "queued" if place is not None else "in_progress"
        num_tokens = generation.usage.completion_tokens
        return _status_object(plan.request_id, plan.model.name, plan.created, status, place, num_tokens)

    async def end_of(self, record: CallRecord) -> str | None:
        """How a held call has ended; None where some of it may still run. Raises BusError."""
        ends = set()
        for request in record.requests:
            ended = await read_end(self._bus, request)
            if ended is None:
                return None
            ends.add(_STATUS_OF_OUTCOME.get(ended.outcome, ended.outcome.value))
        return ends.pop() if len(ends) == 1 else None

    async def of_record(self, record: CallRecord) -> dict[str, Any]:
        """Of a held call, wherever it was begun. Raises BusError."""
        place: Place | None = None
        num_tokens = 0
        statuses = set()
        for request, sequence, num_prompt_tokens in zip(
            record.requests, record.stream_sequences, record.num_prompt_tokens, strict=True
        ):
            log = await read_log(self._bus, request)
            ends = {(frame.choice, frame.index + len(frame.tokens)) for frame in log.frames}
            num_tokens += sum(
                max([0, *(end for choice, end in ends if choice == number)]) for number in range(request.num_choices)
            )
            if log.ended is not None:
                statuses.add(_STATUS_OF_OUTCOME.get(log.ended.outcome, log.ended.outcome.value))
            elif log.frames:
                statuses.add("in_progress")
            elif sequence and await self._bus.holds(REQUESTS, sequence):
                statuses.add("queued")
                place = self._watch.place(request, sequence, num_prompt_tokens)
            else:
                statuses.add("expired")
        status = next(iter(statuses)) if len(statuses) == 1 else "in_progress"
        return _status_object(
            record.request_id,
            record.requests[0].adapter or record.requests[0].model,
            record.created,
            status,
            place if status == "queued" else None,
            num_tokens,
        )


def _status_object(
    request_id: str, model: str, created: int, status: str, place: Place | None, num_tokens: int
) -> dict[str, Any]:
    shape: dict[str, Any] = {
        "id": request_id,
        "object": "request",
        "created": created,
        "model": model,
        "status": status,
        "completion_tokens": num_tokens,
    }
    return shape if place is None else {**shape, **fields(place)}
