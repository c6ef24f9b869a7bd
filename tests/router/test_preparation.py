"""A body to a tokenized call: what takes a thread, and what is counted once."""

import asyncio
import json
import threading

import pytest

from headrace_router.bodies import Body
from headrace_router.grammar_checks import GrammarChecks
from headrace_router.models import ServedModel
from headrace_router.preparation import MAX_INLINE_BYTES, Endpoint, Preparer
from headrace_router.template_pool import TemplatePool
from headrace_router.tokenization import PromptPool
from headrace_shared.codec import unpack_ids
from headrace_shared.errors import InvalidRequest, Overloaded
from tests.byte_model import make_card
from tests.router.local_chat import local_encoder

CARD = make_card(context=100_000)
MODEL = ServedModel(CARD, local_encoder(CARD))


def body_of(prompt: str | list[int] | list[list[int]]) -> bytes:
    return json.dumps({"model": CARD.model, "prompt": prompt}).encode()


async def test_few_token_ids_wait_for_no_thread() -> None:
    gate = threading.Event()
    pool = PromptPool(1, 0)
    preparer = Preparer(pool, TemplatePool(), GrammarChecks())
    busy = asyncio.create_task(pool.run(lambda: gate.wait(10)))
    await asyncio.sleep(0)
    try:
        for prompt in ([1, 2, 3], [[1, 2], [3]]):
            parsed = await preparer.parse(Endpoint.COMPLETION, Body(body_of(prompt)))
            prepared = await preparer.prepare(parsed, MODEL, 0, "")
            ids = [token for encoded in prepared.encoded for token in unpack_ids(encoded.ids)]
            assert ids == [1, 2, 3]
        for wrong in ([-1], [CARD.vocab_size]):
            with pytest.raises(InvalidRequest):
                parsed = await preparer.parse(Endpoint.COMPLETION, Body(body_of(wrong)))
                await preparer.prepare(parsed, MODEL, 0, "")
        for long in ("text", [1] * (MAX_INLINE_BYTES // 2)):
            parsed = await preparer.parse(Endpoint.COMPLETION, Body(body_of(long)))
            with pytest.raises(Overloaded):
                await preparer.prepare(parsed, MODEL, 0, "")
    finally:
        gate.set()
        await busy
        pool.close()
