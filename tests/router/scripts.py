"""What scripted workers do with a request."""

import asyncio
import math
from array import array
from collections.abc import Iterator

from headrace_shared.codec import unpack_ids
from headrace_shared.messages import FinishReason, Request, TokenFrame, TokenLogprobs, TopLogprob
from tests.byte_model import byte_ids
from tests.router.support import ScriptedWorker, prompt_of, says


async def endless(worker: ScriptedWorker, request: Request) -> None:
    for index in range(10_000):
        worker.frame(request, byte_ids("a"), index)
        await asyncio.sleep(0.01)


async def silent(worker: ScriptedWorker, request: Request) -> None:
    await asyncio.sleep(100)


def score_frames(request: Request, size: int = 3) -> Iterator[TokenFrame]:
    """Of position p: -p/4, rank p; each alternative a token of its own."""
    prompt = prompt_of(request)
    wanted = request.sampling.num_prompt_logprobs
    if wanted is None:
        return
    for start in range(1, len(prompt), size):
        positions = range(start, min(start + size, len(prompt)))
        yield TokenFrame(
            request_id=request.request_id,
            choice=0,
            attempt=0,
            index=start - len(prompt),
            tokens=tuple(prompt[position] for position in positions),
            logprobs=tuple(
                TokenLogprobs(-position / 4, tuple(TopLogprob(rank, -1.0 - rank) for rank in range(wanted)), position)
                for position in positions
            ),
        )


async def scored(worker: ScriptedWorker, request: Request) -> None:
    """Frames come one by one and twice, as a broker may have it."""
    for frame in score_frames(request):
        worker.publish(request, frame)
        worker.publish(request, frame)
        await asyncio.sleep(0)
    await says("ab")(worker, request)


EMBEDDING_SIZE = 8


def vector_of(request: Request) -> list[float]:
    """Of length 1, and different for different prompts."""
    ids = unpack_ids(request.prompt)
    values = [math.sin(sum(ids) + place) for place in range(EMBEDDING_SIZE)]
    length = math.sqrt(sum(value * value for value in values))
    return array("f", [value / length for value in values]).tolist()


async def embed(worker: ScriptedWorker, request: Request) -> None:
    frame = TokenFrame(
        request_id=request.request_id,
        choice=0,
        attempt=0,
        index=0,
        tokens=(1,),
        finish=FinishReason.LENGTH,
        embedding=array("f", vector_of(request)).tobytes() if request.embeds else b"",
    )
    worker.publish(request, frame)


async def scored_or_embedded(worker: ScriptedWorker, request: Request) -> None:
    await (embed if request.embeds else scored)(worker, request)
