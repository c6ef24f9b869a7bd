"""Steady load on the system: clients that each ask again as soon as they have been answered."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from openai import AsyncOpenAI, OpenAIError

MAX_TOKENS = 24


class Load:
    def __init__(self) -> None:
        self.num_answers = 0
        self.failures: list[str] = []
        self._changed = asyncio.Condition()

    async def note(self, failure: str) -> None:
        """One request has ended; `failure` is empty if it was answered in full."""
        async with self._changed:
            self.num_answers += not failure
            self.failures += [failure] * bool(failure)
            self._changed.notify_all()

    async def wait_for_answers(self, count: int, timeout_s: float = 400.0) -> None:
        """Until `count` more requests have been answered, or one has failed. Raises TimeoutError."""
        goal = self.num_answers + count
        async with asyncio.timeout(timeout_s), self._changed:
            await self._changed.wait_for(lambda: self.num_answers >= goal or self.failures)


@contextlib.asynccontextmanager
async def running_load(url: str, model: str, num_clients: int) -> AsyncIterator[Load]:
    """Load while the block runs; at its end each client finishes its last request."""
    load = Load()
    stop = asyncio.Event()
    async with AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=120) as client:

        async def ask_again_and_again(name: int) -> None:
            while not stop.is_set() and not load.failures:
                try:
                    failure = await _ask(client, model, f"Client {name}, question {load.num_answers}: tell me a story.")
                except OpenAIError as error:
                    failure = repr(error)
                await load.note(failure)

        async with asyncio.TaskGroup() as group:
            for name in range(num_clients):
                group.create_task(ask_again_and_again(name))
            try:
                yield load
            finally:
                stop.set()


async def _ask(client: AsyncOpenAI, model: str, question: str) -> str:
    """What is wrong with the answer; empty if nothing is. It is to run to the token limit."""
    stream = await client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        max_tokens=MAX_TOKENS,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    finish, num_tokens = None, 0
    async for chunk in stream:
        if chunk.choices:
            finish = chunk.choices[0].finish_reason or finish
        if chunk.usage:
            num_tokens = chunk.usage.completion_tokens
    return "" if (finish, num_tokens) == ("length", MAX_TOKENS) else f"finish {finish} after {num_tokens} tokens"
