"""Runs one line as the call that it describes: the same path as over HTTP, as the caller who made the batch, in the
batch lane, and under an idempotency key of its own, so that whoever goes on with the batch goes on with the call too.
"""

import time
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple

import msgspec
import structlog
from starlette.datastructures import Headers
from starlette.types import Message

from headrace_router.accounts import Charge
from headrace_router.answering import HELD_ID
from headrace_router.batches.lines import Line
from headrace_router.batches.results import LineResult, line_id
from headrace_router.bodies import Body
from headrace_router.call import Call, new_request_id
from headrace_router.call_meter import CallMeter
from headrace_router.call_options import IDEMPOTENCY_KEY, LANE
from headrace_router.http_errors import to_http, to_request_error
from headrace_router.identity import Identity
from headrace_router.metrics import RouterMetrics
from headrace_shared.errors import BusError, InvalidRequest, RequestError
from headrace_shared.messages import Lane
from headrace_shared.trace_context import new_trace

log = structlog.get_logger(__name__)

Answer = Callable[[Call, Body], Awaitable[None]]
"""Answers a call through its `send`, or raises before it has sent anything."""


class LineFailed(Exception):
    """The call was not answered."""

    def __init__(self, error: RequestError, *, had_begun: bool) -> None:
        super().__init__(error.message)
        self.error = error
        self.had_begun = had_begun
        """Tokens had come."""


class BatchLine(NamedTuple):
    batch_id: str
    line: Line
    attempt: int
    """Rises when the answer to an attempt is lost."""

    @property
    def shown_id(self) -> str:
        return line_id(self.batch_id, self.line.number)

    @property
    def idempotency_key(self) -> str:
        return f"{self.batch_id}/{self.line.number}/{self.attempt}"


class LineExecutor:
    def __init__(
        self,
        endpoints: Mapping[str, Answer],
        metrics: RouterMetrics,
        abort: Callable[[str, str], None],
        forget: Callable[[str, str, str], Awaitable[None]],
    ) -> None:
        """`endpoints`: path -> who answers there. `abort(owner, shown id)` ends a call. `forget(owner, idempotency key,
        request id)` frees what is kept for whoever would ask again."""
        self.endpoints = dict(endpoints)
        self._metrics = metrics
        self._abort = abort
        self._forget = forget

    async def run(self, endpoint: str, identity: Identity, batch_line: BatchLine) -> LineResult:
        """Raises LineFailed."""
        heard = _Heard()
        request_id = new_request_id()
        arrived_at = time.monotonic()
        meter = CallMeter(self._metrics, arrived_at)
        headers = Headers({LANE: Lane.BATCH.value, IDEMPOTENCY_KEY: batch_line.idempotency_key})
        context = new_trace()
        told: RequestError | None = None
        with structlog.contextvars.bound_contextvars(request_id=request_id, trace_id=context.trace_id):
            call = Call(
                request_id,
                batch_line.shown_id,
                headers,
                heard.send,
                arrived_at,
                identity,
                Charge(),
                meter,
                context,
            )
            try:
                await self.endpoints[endpoint](call, Body(batch_line.line.body))
            except Exception as error:  # what ends one line is told in its result, and ends no other
                if not isinstance(error, RequestError | BusError):
                    log.exception("line of a batch failed", batch_id=batch_line.batch_id)
                told = to_request_error(error)
                raise LineFailed(told, had_begun=meter.first_token_s is not None) from error
            finally:
                meter.close(told)
        if not heard.is_json:
            # The caller asked for something that cannot be in a line: a stream, in spite of all checks.
            problem = InvalidRequest("The answer is no JSON.", code="invalid_body", param="body")
            raise LineFailed(problem, had_begun=True)
        return result_of(batch_line.line, heard.status, heard.request_id or request_id, bytes(heard.body))

    async def done(self, owner: str, batch_line: BatchLine, result: LineResult) -> None:
        """Its result is stored. A batch's thousands of keys would take the room of others for a day."""
        self._metrics.batch_line(is_good=result.is_good)
        if result.request_id:
            try:
                await self._forget(owner, batch_line.idempotency_key, result.request_id)
            except BusError as error:
                log.debug("key of a line not removed", batch_id=batch_line.batch_id, error=str(error))

    def abort(self, identity: Identity, batch_line: BatchLine) -> None:
        self._abort(identity.owner, batch_line.shown_id)


class _Heard:
    """What a client would have got."""

    def __init__(self) -> None:
        self.status = 0
        self.request_id = ""
        self.is_json = True
        self.body = bytearray()

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = Headers(raw=message["headers"])
            self.request_id = headers.get(HELD_ID, "")
            self.is_json = headers.get("content-type", "application/json").startswith("application/json")
        else:
            self.body += message.get("body", b"")


def result_of(line: Line, status: int, request_id: str, body: bytes) -> LineResult:
    # One line of a file, whatever the endpoint writes.
    body = msgspec.json.format(body, indent=-1) if b"\n" in body else body
    return LineResult(number=line.number, custom_id=line.custom_id, status=status, request_id=request_id, body=body)


def result_of_failure(line: Line, error: RequestError) -> LineResult:
    """As over HTTP."""
    http = to_http(error)
    return result_of(line, http.status, "", msgspec.json.encode(http.body))
