"""What the token log tells about a request whose earlier owner, or whose worker, is gone."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import structlog

from headrace_scheduler.decisions import ChoiceLog
from headrace_scheduler.prefix_index import TOKEN_BYTES
from headrace_shared import codec
from headrace_shared.bus import Bus
from headrace_shared.errors import ProtocolError
from headrace_shared.messages import FinishReason, LogMessage, Request, RequestEnded, RequestId, RouterId, TokenFrame
from headrace_shared.subjects import TOKENS, tokens_subject

MAX_LOG_MESSAGES = 200_000
"""Of one request; beyond that the rest is generated again."""

log = structlog.get_logger(__name__)


class RequestLog(NamedTuple):
    choices: dict[int, ChoiceLog]
    has_ended: bool
    has_gap: bool = False
    """Some frames follow nothing that is there."""


async def read_log(bus: Bus, router: RouterId, request_id: RequestId, first: int = 0) -> RequestLog:
    """`first`: see `parse_log`. Raises BusError."""
    messages = await bus.read(TOKENS.name, tokens_subject(router, request_id), MAX_LOG_MESSAGES)
    return parse_log((message.data for message in messages), first)


async def read_beyond(bus: Bus, request: Request, known: Mapping[int, Sequence[int]], window: int) -> RequestLog:
    """What the log has beyond the outputs that are `known`, by choice. It is looked for among the last `window`
    messages of all logs: a long answer has thousands, and of those some are missing at most. Raises BusError."""
    subject = tokens_subject(request.router, request.request_id)
    last = await bus.last(TOKENS.name, subject)
    if last is None:
        return RequestLog({}, False)
    first = first_index(request)
    if first == 0 or known.get(0):
        start = max(1, last.stream_sequence - window)
        messages = await bus.read(TOKENS.name, subject, MAX_LOG_MESSAGES, start)
        found = parse_log((message.data for message in messages), known=known)
        if not found.has_gap:
            return found
    return await read_log(bus, request.router, request.request_id, first)


def first_index(request: Request) -> int:
    """Where choice 0 begins in the log: before 0 if the prompt's log-probabilities are told there."""
    scores_prompt = request.sampling.num_prompt_logprobs is not None
    return 1 - len(request.prompt) // TOKEN_BYTES if scores_prompt else 0


def parse_log(
    payloads: Iterable[bytes], first: int = 0, known: Mapping[int, Sequence[int]] | None = None
) -> RequestLog:
    """Puts the frames of all attempts together. Only what follows index 0 without a gap counts, in choice 0 what
    follows index `first`: the log may have lost its beginning. Of an index that was told twice the first time counts,
    as it does for routers. `known`: outputs that the frames follow, by choice."""
    reached = first
    outputs: dict[int, list[int]] = {choice: list(output) for choice, output in (known or {}).items()}
    attempts: dict[int, int] = {}
    finishes: dict[int, FinishReason] = {}
    has_ended = has_gap = False
    for payload in payloads:
        try:
            message: LogMessage = codec.decode(payload, LogMessage)
        except ProtocolError as error:
            log.warning("undecodable message in the token log", error=str(error))
            continue
        if isinstance(message, RequestEnded):
            has_ended = True
            continue
        attempts[message.choice] = max(message.attempt, attempts.get(message.choice, 0))
        output = outputs.setdefault(message.choice, [])
        if message.choice == 0 and message.index <= reached < 0:
            reached = max(reached, min(0, _ends_at(message)))
        if message.index < 0 or (message.choice == 0 and reached < 0):
            continue
        has_gap = has_gap or message.index > len(output)
        if message.index <= len(output):
            output.extend(message.tokens[len(output) - message.index :])
            if message.finish is not None and _ends_at(message) == len(output):
                finishes[message.choice] = message.finish
    choices = {
        choice: ChoiceLog(tuple(outputs[choice]), attempt, finishes.get(choice)) for choice, attempt in attempts.items()
    }
    return RequestLog(choices, has_ended, has_gap)


def _ends_at(frame: TokenFrame) -> int:
    return frame.index + len(frame.tokens)
