"""Answers a call for more embeddings than are computed at a time: its pieces one after the other, as one answer."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from starlette.types import Message

from headrace_router.accounts import Charge
from headrace_router.answering import HELD_ID
from headrace_router.call import Call, new_request_id
from headrace_router.call_options import CallOptions
from headrace_router.choices import Usage
from headrace_router.embedding_pieces import PieceAnswer, beginning, ending, form_wanted, read_answer, written
from headrace_router.preparation import Parsed
from headrace_shared.errors import Overloaded

AnswerPiece = Callable[[Call, Parsed, CallOptions], Awaitable[None]]
_OF_PIECES = frozenset({b"content-length", HELD_ID.encode()})
"""Headers that say something of a piece alone."""


async def answer_in_pieces(
    call: Call, whole: Parsed, pieces: Sequence[Parsed], options: CallOptions, answer: AnswerPiece, until: float
) -> None:
    """`answer` does so with each piece, through its call's `send`; `until`: monotonic. The call's charge is settled.
    Raises RequestError or BusError before the first byte."""
    answers: list[PieceAnswer] = []
    num_tokens = 0
    for number, piece in enumerate(pieces):
        with piece.given:
            heard = await _heard(call, piece, _options_of(options, number), answer, until, is_first=not number)
        answers.append(read_answer(bytes(heard.body)))
        num_tokens += answers[-1].usage.prompt_tokens
        call.charge.settle(num_tokens)
    if call.trace is not None:
        call.trace.name(answers[0].model)
        call.trace.end("finished", call.request_id, Usage(num_tokens, 0, 0), (), call.meter.first_token_s)
    # The status can be told now: nothing is left that could fail.
    await call.send({"type": "http.response.start", "status": 200, "headers": heard.headers})
    await _send(call, beginning())
    first, form = 0, form_wanted(whole)
    for told in answers:
        text = await asyncio.to_thread(written, told.data, first, form)
        await _send(call, b"," + text if first else text)
        first += len(told.data)
    await _send(call, ending(answers), is_last=True)


class _Heard:
    """What the client of one piece would have got."""

    def __init__(self) -> None:
        self.headers: list[tuple[bytes, bytes]] = []
        self.body = bytearray()

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.headers = [(name, value) for name, value in message["headers"] if name not in _OF_PIECES]
        else:
            self.body += message.get("body", b"")


def _options_of(options: CallOptions, number: int) -> CallOptions:
    """Each piece is repeated by itself. No client's key has such a character."""
    key = options.idempotency_key
    return options if key is None else options._replace(idempotency_key=f"{key}\0{number}")


async def _heard(
    call: Call, piece: Parsed, options: CallOptions, answer: AnswerPiece, until: float, *, is_first: bool
) -> _Heard:
    """Once the first piece was let in, the others wait for their turn instead of being refused."""
    while True:
        heard = _Heard()
        # The whole is paid for, and traced.
        own = call._replace(request_id=new_request_id(), send=heard.send, charge=Charge(), trace=None)
        try:
            await answer(own, piece, options)
            return heard
        except Overloaded as error:
            if is_first or error.code == "draining" or time.monotonic() + error.retry_after_s >= until:
                raise
            await asyncio.sleep(error.retry_after_s)


async def _send(call: Call, data: bytes, *, is_last: bool = False) -> None:
    await call.send({"type": "http.response.body", "body": data, "more_body": not is_last})
