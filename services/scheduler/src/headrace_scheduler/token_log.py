"""What the token log tells about a request whose earlier owner is gone."""

from collections.abc import Iterable
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


async def read_log(bus: Bus, router: RouterId, request_id: RequestId, first: int = 0) -> RequestLog:
    """`first`: see `parse_log`. Raises BusError."""
    messages = await bus.read(TOKENS.name, tokens_subject(router, request_id), MAX_LOG_MESSAGES)
    return parse_log((message.data for message in messages), first)


def first_index(request: Request) -> int:
    """Where choice 0 begins in the log: before 0 if the prompt's log-probabilities are told there."""
    scores_prompt = request.sampling.num_prompt_logprobs is not None
    return 1 - len(request.prompt) // TOKEN_BYTES if scores_prompt else 0


def parse_log(payloads: Iterable[bytes], first: int = 0) -> RequestLog:
    """Puts the frames of all attempts together. Only what follows index 0 without a gap counts, in choice 0 what
    follows index `first`: the log may have lost its beginning. Tokens of different attempts agree, since sampling
    depends on seed, choice and position alone."""
    reached = first
    outputs: dict[int, list[int]] = {}
    attempts: dict[int, int] = {}
    finishes: dict[int, FinishReason] = {}
    has_ended = False
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
        if message.index <= len(output):
            output.extend(message.tokens[len(output) - message.index :])
            if message.finish is not None and _ends_at(message) == len(output):
                finishes[message.choice] = message.finish
    choices = {
        choice: ChoiceLog(tuple(output), attempts[choice], finishes.get(choice)) for choice, output in outputs.items()
    }
    return RequestLog(choices, has_ended)


def _ends_at(frame: TokenFrame) -> int:
    return frame.index + len(frame.tokens)
