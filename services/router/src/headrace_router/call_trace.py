"""The spans of one call at its router, where tracing is on.

    POST /v1/chat/completions       SERVER    (http_observer.py)
      chat {model}                  INTERNAL  lives as long as the answer
        prepare                     INTERNAL  template and tokenization
        publish requests.…          PRODUCER  its context travels with the request

What schedulers and workers do with the request hangs on the last one.
"""

import time
from collections.abc import Sequence
from typing import NamedTuple

from headrace_router.call_content import CallContent, prompt_of
from headrace_router.choices import ChoiceText, Delta, Usage
from headrace_router.schemas import ChatBody, CompletionBody
from headrace_router.validation import ValidParams
from headrace_shared.messages import FinishReason, Request, TokenFrame
from headrace_shared.trace_context import TraceContext, parse_trace
from headrace_shared.tracing import PROVIDER, REQUESTS_TEMPLATE, Span, Tracing, Value, messaging, wall_time


class CallTraces(NamedTuple):
    """Makes the traces of a router's calls."""

    tracing: Tracing
    records_content: bool = False

    def of(self, server: Span, arrived_at: float) -> "CallTrace":
        """`arrived_at`: monotonic."""
        return CallTrace(self.tracing, server, arrived_at, CallContent() if self.records_content else None)


class CallTrace:
    def __init__(self, tracing: Tracing, server: Span, arrived_at: float, content: CallContent | None) -> None:
        """`content`: where to keep what is said; None: nowhere."""
        self._tracing = tracing
        self._server = server
        self._arrived_at = arrived_at
        self._span: Span | None = None
        self._operation = ""
        self._content = content
        self.detokenize_s = 0.0

    @property
    def context(self) -> TraceContext:
        return (self._span or self._server).context

    def begin(self, operation: str, origin: Request | None = None) -> None:
        """`operation`: as the conventions name it; `origin`: what another call has queued, to whose trace this one is
        linked."""
        self._operation = operation
        context = parse_trace(origin.trace) if origin is not None else None
        self._span = self._tracing.begin(
            operation,
            "internal",
            self._server.context,
            at=wall_time(self._arrived_at),
            attributes={"gen_ai.operation.name": operation, "gen_ai.provider.name": PROVIDER},
            links=[context] if context is not None else [],
        )

    def prepared(self, model: str, body: ChatBody | CompletionBody, params: ValidParams, began_at: float) -> None:
        """The call is valid and tokenized; that began at `began_at`, monotonic."""
        span = self._tracing.begin("prepare", "internal", self.context, at=wall_time(began_at))
        span.end()
        self.name(model)
        if self._span is not None and self._span.is_recording:
            self._span.set(_asked(params))
            if self._content is not None:
                self._span.set({"gen_ai.input.messages": prompt_of(body)})

    def publish(self, request: Request, subject: str) -> Span:
        """Of the request's way into the queue, attempts and all."""
        attributes = messaging(
            "publish",
            REQUESTS_TEMPLATE,
            subject,
            message__id=request.request_id,
            message__conversation_id=request.request_id,
        )
        return self._tracing.begin(f"publish {REQUESTS_TEMPLATE}", "producer", self.context, attributes=attributes)

    def detokenized(self, number: int, choice: ChoiceText, frame: TokenFrame) -> Delta:
        """Pushes the frame, and adds up how long that takes: there is no span for each token."""
        began_at = time.perf_counter()
        delta = choice.push(frame)
        self.detokenize_s += time.perf_counter() - began_at
        if self._content is not None:
            self._content.heard(number, delta.text)
        return delta

    def end(
        self,
        outcome: str,
        request_id: str,
        usage: Usage,
        choices: Sequence[FinishReason | None],
        first_token_s: float | None,
    ) -> None:
        """`choices`: why each ended, None where it did not; `first_token_s`: from the arrival on."""
        span = self._span
        if span is None:
            return
        self._span = None
        if not span.is_recording:
            return
        attributes: dict[str, Value] = {
            "headrace.request.id": request_id,
            "headrace.outcome": outcome,
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.output_tokens": usage.completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
            "gen_ai.latency.e2e": time.monotonic() - self._arrived_at,
            "headrace.detokenize.duration": self.detokenize_s,
        }
        if finishes := [finish.value for finish in choices if finish is not None]:
            attributes["gen_ai.response.finish_reasons"] = finishes
        if self._content is not None:
            attributes["gen_ai.output.messages"] = self._content.answers(choices)
        if first_token_s is not None:
            attributes["gen_ai.response.time_to_first_chunk"] = first_token_s
            attributes["gen_ai.latency.time_to_first_token"] = first_token_s
            span.event("first_token", at=wall_time(self._arrived_at + first_token_s))
        if self.detokenize_s:
            span.event("detokenized", {"headrace.detokenize.duration": self.detokenize_s})
        span.set(attributes)
        span.end(error=None if outcome in ("finished", "cancelled", "cut") else outcome)

    def close(self, error: str | None) -> None:
        """Nothing was queued, or something went wrong on the way: whatever is open ends."""
        span, self._span = self._span, None
        if span is not None:
            span.end(error=error)

    def name(self, model: str) -> None:
        """The model is known: no name of a client's making."""
        if self._span is not None:
            self._span.rename(f"{self._operation} {model}")
            self._span.set({"gen_ai.request.model": model, "gen_ai.response.model": model})


def _asked(params: ValidParams) -> dict[str, Value]:
    """Stop strings are left out: a client wrote them."""
    sampling = params.sampling
    asked: dict[str, Value] = {
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
        "gen_ai.request.presence_penalty": sampling.presence_penalty,
        "gen_ai.request.choice.count": params.num_choices,
        "gen_ai.request.stream": params.stream,
        "gen_ai.output.type": "text",
    }
    if params.max_tokens is not None:
        asked["gen_ai.request.max_tokens"] = params.max_tokens
    if params.has_seed:
        asked["gen_ai.request.seed"] = sampling.seed
    return asked
