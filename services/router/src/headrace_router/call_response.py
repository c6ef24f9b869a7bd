"""Runs one call as an ASGI response, and stops it the moment the client is gone, streaming or not."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import structlog
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from headrace_router.accounts import Charge
from headrace_router.answering import StreamCut
from headrace_router.authentication import identity_of
from headrace_router.bodies import Body, BodyLimits, ClientGone, receive_json, shown_request_id
from headrace_router.call import Call, new_request_id
from headrace_router.call_meter import CallMeter
from headrace_router.call_trace import CallTraces
from headrace_router.http_errors import error_response, to_request_error
from headrace_router.http_observer import SPAN
from headrace_router.messages_api.error_shape import is_messages_path
from headrace_router.metrics import RouterMetrics
from headrace_shared.errors import BusError, RequestError
from headrace_shared.trace_context import continue_trace
from headrace_shared.tracing import Span

log = structlog.get_logger(__name__)

Answer = Callable[[Call, Body], Awaitable[None]]


class ClientLimits(NamedTuple):
    body: BodyLimits
    send_timeout_s: float
    """A client that takes nothing for so long is cut off."""


class ClientStuck(Exception):
    """The client keeps the connection and reads nothing."""


class _Channel:
    """The way to the client, and since when it has been blocked."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.has_started = False
        self.sending_since: float | None = None

    async def send(self, message: Message) -> None:
        self.has_started = True
        self.sending_since = time.monotonic()
        await self._send(message)
        self.sending_since = None


class CallResponse(Response):
    """Not a StreamingResponse: that one looks at its client only while streaming."""

    def __init__(
        self, answer: Answer, limits: ClientLimits, metrics: RouterMetrics, traces: CallTraces | None = None
    ) -> None:
        self._answer = answer
        self._limits = limits
        self._metrics = metrics
        self._traces = traces
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        request_id = new_request_id()
        shown_id = shown_request_id(headers, request_id)
        channel = _Channel(send)
        arrived_at = time.monotonic()
        meter = CallMeter(self._metrics, arrived_at)
        span: Span | None = scope.get(SPAN)
        trace = self._traces.of(span, arrived_at) if self._traces is not None and span is not None else None
        context = span.context if span is not None else continue_trace(headers)
        told: RequestError | None = None
        # What is logged on the way says for which call, also as its client calls it, who may ask about it later; the
        # task that does the work inherits it.
        names = {"request_id": request_id, "trace_id": context.trace_id}
        names |= {"client_request_id": shown_id} if shown_id != request_id else {}
        with structlog.contextvars.bound_contextvars(**names):
            call = Call(
                request_id,
                shown_id,
                headers,
                channel.send,
                arrived_at,
                identity_of(scope),
                Charge(),
                meter,
                context,
                trace,
            )
            try:
                told = await self._serve(call, channel, scope, receive, send)
            finally:
                meter.close(told)
                if trace is not None:
                    trace.close(None if told is None else told.code)

    async def _serve(
        self, call: Call, channel: _Channel, scope: Scope, receive: Receive, send: Send
    ) -> RequestError | None:
        """Returns what the client was told instead of an answer, if it was."""
        request_id = call.request_id
        try:
            with await receive_json(Headers(scope=scope), receive, self._limits.body) as body:
                await self._run(call, body, receive, channel)
        except ClientGone:
            self._metrics.client_gone()
        # Returning before the end of the body makes the server close the connection: no clean end.
        except ClientStuck:
            self._metrics.client_gone()
            log.warning("client reads nothing; cut off", request_id=request_id)
        except StreamCut:
            log.info("stream cut, to be resumed elsewhere", request_id=request_id)
        except Exception as error:  # the caller gets an answer, whatever it is
            if channel.has_started:
                raise
            known = to_request_error(error)
            self._metrics.refused(known.code)
            if not isinstance(error, RequestError | BusError):
                log.exception("call failed", request_id=request_id)
            # The frames that it came through, this one too, would keep the body until the next garbage collection.
            known = known.with_traceback(None)
            error.__traceback__ = None
            path = scope["path"]
            response = error_response(
                known,
                call.shown_id if is_messages_path(path) else "",
                headers={"x-request-id": call.shown_id} | _closing(known.code),
                path=path,
            )
            await response(scope, receive, send)
            return known
        return None

    async def _run(self, call: Call, body: Body, receive: Receive, channel: _Channel) -> None:
        work = asyncio.ensure_future(self._answer(call, body))
        gone = asyncio.ensure_future(_until_disconnected(receive))
        try:
            # One look now and then is cheaper than a timer around each token.
            period_s = self._limits.send_timeout_s / 4
            while not work.done():
                await asyncio.wait((work, gone), timeout=period_s, return_when=asyncio.FIRST_COMPLETED)
                if gone.done() and not work.done():
                    raise ClientGone
                since = channel.sending_since
                if since is not None and time.monotonic() - since > self._limits.send_timeout_s:
                    raise ClientStuck
        finally:
            gone.cancel()
            work.cancel()
            await asyncio.gather(gone, work, return_exceptions=True)
        work.result()


async def _until_disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _closing(code: str) -> dict[str, Any]:
    # Of a body that is too large the server reads on and keeps nothing: clients that write before they read would
    # otherwise see a reset connection instead of the answer.
    return {"connection": "close"} if code == "body_timeout" else {}
