"""The two generating endpoints: from a body to the last byte of the answer."""

import secrets
import time
from collections.abc import Mapping
from typing import NamedTuple

import structlog
from msgspec import UNSET, UnsetType
from starlette.types import Send

from headrace_router import sse
from headrace_router.admission import QueueHealth, admit
from headrace_router.cancellation import Canceller
from headrace_router.choices import Delta
from headrace_router.generation import Generation, Limits
from headrace_router.http_errors import error_object, to_request_error
from headrace_router.inflight import InFlightTable
from headrace_router.metrics import RouterMetrics
from headrace_router.models import Models, ServedModel
from headrace_router.parsing import parse_body
from headrace_router.requests import EncodedPrompt, encode_chat, encode_prompts, make_prompts
from headrace_router.responses import Formatter, Identity, UsageObject, to_json, usage_object
from headrace_router.schemas import ChatBody, CompletionBody, GenerationBody
from headrace_router.tokenization import PromptPool
from headrace_router.unsupported import unknown_fields
from headrace_router.validation import ValidParams, validate_chat, validate_completion
from headrace_shared.bus import Bus
from headrace_shared.errors import BusError, RequestError
from headrace_shared.messages import RequestId, RouterId
from headrace_shared.telemetry import continue_trace

log = structlog.get_logger(__name__)

MAX_UNKNOWN_FIELDS = 1000
"""Names of unknown fields that are remembered, so that each is logged once."""


class CallSettings(NamedTuple):
    limits: Limits
    max_inflight: int
    ping_interval_s: float


class Call(NamedTuple):
    """One HTTP call on its way."""

    request_id: RequestId
    shown_id: str
    headers: Mapping[str, str]
    send: Send
    arrived_at: float
    """Monotonic."""


class Progress:
    """What the metrics want to know of a call."""

    def __init__(self) -> None:
        self.outcome = "cancelled"
        self.first_token_s: float | None = None


class Caller:
    """Answers calls. Whatever it raises, it raises before the first byte of an answer."""

    def __init__(
        self,
        *,
        bus: Bus,
        router: RouterId,
        models: Models,
        table: InFlightTable,
        canceller: Canceller,
        pool: PromptPool,
        metrics: RouterMetrics,
        settings: CallSettings,
    ) -> None:
        self._bus = bus
        self._router = router
        self._models = models
        self._table = table
        self._canceller = canceller
        self._pool = pool
        self._metrics = metrics
        self._settings = settings
        self._unknown_fields: set[str] = set()
        self.queue_health = QueueHealth(time.monotonic)

    async def chat(self, call: Call, data: bytes) -> None:
        self._admit()
        body = parse_body(ChatBody, data)
        model = self._models.get(body.model)
        chat, params = validate_chat(body, model.card, secrets.randbits(63))
        self._note_unknown(body)
        encoded = await self._pool.run(lambda: encode_chat(model, chat, params))
        await self._generate(call, model, params, encoded, is_chat=True)

    async def completion(self, call: Call, data: bytes) -> None:
        self._admit()
        body = parse_body(CompletionBody, data)
        model = self._models.get(body.model)
        prompts, params = validate_completion(body, model.card, secrets.randbits(63))
        self._note_unknown(body)
        encoded = await self._pool.run(lambda: encode_prompts(model, prompts, params))
        await self._generate(call, model, params, encoded, is_chat=False)

    def _admit(self) -> None:
        is_reachable = self._bus.disconnected_for_s < self._settings.limits.publish_timeout_s
        admit(len(self._table), self._settings.max_inflight, is_reachable=is_reachable)

    def _note_unknown(self, body: GenerationBody) -> None:
        for name in unknown_fields(body.model_extra or {}):
            if name not in self._unknown_fields and len(self._unknown_fields) < MAX_UNKNOWN_FIELDS:
                self._unknown_fields.add(name)
                log.warning("unknown request field", field=name[:64])

    async def _generate(
        self, call: Call, model: ServedModel, params: ValidParams, encoded: list[EncodedPrompt], *, is_chat: bool
    ) -> None:
        trace = continue_trace(call.headers).to_headers()
        ids = iter([call.request_id])
        prompts = make_prompts(
            encoded,
            params,
            model,
            self._router,
            trace,
            lambda: next(ids, None) or new_request_id(),
            self._bus.max_payload,
        )
        prefix = "chatcmpl" if is_chat else "cmpl"
        identity = Identity(f"{prefix}-{call.request_id}", int(time.time()), model.card.model)
        formatter = Formatter(
            identity, model.encoder.vocabulary, is_chat=is_chat, num_logprobs=params.sampling.num_logprobs
        )
        generation = Generation(
            prompts, bus=self._bus, table=self._table, canceller=self._canceller, limits=self._settings.limits
        )
        progress = Progress()
        self._metrics.begun()
        try:
            async with generation:
                self.queue_health.succeeded()
                if params.stream:
                    await self._stream(call, model, params, generation, formatter, progress)
                else:
                    await self._answer(call, model, generation, formatter, len(prompts) * params.num_choices, progress)
                progress.outcome = "finished"
        except (RequestError, BusError) as error:
            progress.outcome = to_request_error(error).code
            if progress.outcome == "unavailable":
                self.queue_health.failed()
            raise
        except _StreamFailed as failed:
            progress.outcome = failed.code
        finally:
            seconds = time.monotonic() - call.arrived_at
            usage = generation.usage
            self._metrics.ended(model.card.model, progress.outcome, usage, seconds, progress.first_token_s)
            log.debug("call ended", request_id=call.request_id, outcome=progress.outcome, **usage._asdict())

    async def _answer(
        self,
        call: Call,
        model: ServedModel,
        generation: Generation,
        formatter: Formatter,
        num_choices: int,
        progress: Progress,
    ) -> None:
        deltas: list[list[Delta]] = [[] for _ in range(num_choices)]
        while not generation.is_complete:
            for event in await generation.next(self._settings.ping_interval_s):
                if progress.first_token_s is None:
                    self._on_first_token(call, model, progress)
                deltas[event.choice].append(event.delta)
        body = to_json(formatter.whole(deltas, usage_object(generation.usage)))
        headers = {
            "content-type": "application/json",
            "content-length": str(len(body)),
            "openai-processing-ms": str(round(1000 * (time.monotonic() - call.arrived_at))),
        }
        await self._send_start(call, headers)
        await self._send_body(call, body, is_last=True)

    async def _stream(
        self,
        call: Call,
        model: ServedModel,
        params: ValidParams,
        generation: Generation,
        formatter: Formatter,
        progress: Progress,
    ) -> None:
        """The status is out before the first token, so failures become events. Raises _StreamFailed after telling."""
        await self._send_start(call, sse.HEADERS)
        usage: UsageObject | UnsetType | None = None if params.include_usage else UNSET
        sent_at = time.monotonic()
        try:
            while not generation.is_complete:
                events = await generation.next(self._settings.ping_interval_s)
                if events and progress.first_token_s is None:
                    self._on_first_token(call, model, progress)
                if params.include_usage and params.continuous_usage:
                    usage = usage_object(generation.usage)
                chunks = [chunk for event in events if (chunk := formatter.chunk(event, usage)) is not None]
                if chunks:
                    data = b"".join([sse.event(to_json(chunk)) for chunk in chunks])
                elif time.monotonic() - sent_at >= self._settings.ping_interval_s:
                    data = sse.PING
                else:
                    continue
                await self._send_body(call, data)
                sent_at = time.monotonic()
        except (RequestError, BusError) as error:
            told = to_request_error(error)
            log.warning("stream failed", request_id=call.request_id, code=told.code, reason=told.message)
            data = sse.event(to_json({"error": error_object(told, call.shown_id)}))
            await self._send_body(call, data + sse.DONE, is_last=True)
            raise _StreamFailed(told.code) from error
        end = sse.DONE
        if params.include_usage:
            end = sse.event(to_json(formatter.usage_chunk(usage_object(generation.usage)))) + end
        await self._send_body(call, end, is_last=True)

    def _on_first_token(self, call: Call, model: ServedModel, progress: Progress) -> None:
        progress.first_token_s = time.monotonic() - call.arrived_at
        self._metrics.first_token(model.card.model, progress.first_token_s)

    async def _send_start(self, call: Call, headers: Mapping[str, str]) -> None:
        raw = [(name.encode(), value.encode()) for name, value in {**headers, "x-request-id": call.shown_id}.items()]
        await call.send({"type": "http.response.start", "status": 200, "headers": raw})

    async def _send_body(self, call: Call, data: bytes, *, is_last: bool = False) -> None:
        await call.send({"type": "http.response.body", "body": data, "more_body": not is_last})


class _StreamFailed(Exception):
    """The client has been told."""

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.code = code


def new_request_id() -> RequestId:
    return RequestId(secrets.token_hex(16))
