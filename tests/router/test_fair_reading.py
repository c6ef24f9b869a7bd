"""A call with very many answers does not keep the event loop to itself."""

import asyncio

from headrace_router.generation import MAX_TAKEN
from headrace_shared.codec import encode
from headrace_shared.messages import FinishReason, TokenFrame
from headrace_shared.subjects import tokens_subject
from tests.router.test_queueing import Setup


async def test_others_have_a_turn_while_thousands_of_frames_are_read() -> None:
    num_prompts = 5 * MAX_TAKEN
    setup = Setup([], num_prompts=num_prompts)
    generation = await setup.start()
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async with generation:
        for request in setup.requests:
            frame = TokenFrame(
                request_id=request.request_id, choice=0, attempt=0, index=0, tokens=(65,), finish=FinishReason.STOP
            )
            setup.bus.publish(tokens_subject(request.router, request.request_id), encode(frame))
        await asyncio.sleep(0.05)
        neighbour = asyncio.create_task(other())
        await asyncio.sleep(0)
        before = turns
        finished: set[int] = set()
        while not generation.is_complete:
            finished |= {delta.choice for delta in await generation.next(1.0)}
        neighbour.cancel()
    assert finished == set(range(num_prompts))
    assert turns - before >= num_prompts // MAX_TAKEN - 1
