"""A broker, and an endpoint that answers lines of batches with what it was asked."""

import asyncio
import json
import random
from collections import Counter
from contextlib import aclosing

import msgspec

from headrace_router.batches.execution import LineExecutor
from headrace_router.batches.journal import Journal
from headrace_router.batches.record import BatchRecord, taken
from headrace_router.batches.run import BatchRun, Parts, RunSettings
from headrace_router.batches.store import BatchStore
from headrace_router.bodies import Body
from headrace_router.call import Call
from headrace_router.files.library import FileLibrary, FileLimits
from headrace_router.files.record import Quota
from headrace_router.identity import Identity
from headrace_router.metrics import RouterMetrics
from headrace_router.owners import owner_token
from headrace_shared.errors import Forbidden, Overloaded, ServiceFailure
from headrace_shared.memory_bus import MemoryBus
from headrace_shared.telemetry import Metrics

URL = "/v1/completions"
OWNER = "tenant:x"


class World:
    """A broker, and an endpoint that answers with what it was asked."""

    def __init__(self, seed: int = 0, bus: MemoryBus | None = None) -> None:
        self.bus = bus or MemoryBus()
        self.chance = random.Random(seed)
        self.now = 1_000.0
        self.trouble = 0.0
        self.answered: Counter[str] = Counter()
        self.aborted: list[str] = []
        self.keys: set[str] = set()
        self.forgotten: set[str] = set()
        self.store, self.journal = BatchStore(self.bus), Journal(self.bus)
        limits = FileLimits(Quota(100, 10**9), 10**8, 60.0)
        self.library = FileLibrary(self.bus, limits, lambda: self.now)
        executor = LineExecutor(
            {URL: self.answer}, RouterMetrics(Metrics()), lambda _, name: self.aborted.append(name), self.forget
        )
        settings = RunSettings(max_lines=1000, concurrency=8, max_result_bytes=10**6)
        self.parts = Parts(
            self.store,
            self.journal,
            self.library,
            executor,
            self.identify,
            lambda _: True,
            settings,
            lambda: self.now,
        )

    async def forget(self, owner: str, key: str, request_id: str) -> None:
        self.forgotten.add(key)

    def identify(self, record: BatchRecord) -> Identity:
        return Identity(record.owner)

    async def answer(self, call: Call, given: Body) -> None:
        body = json.loads(given.data)
        self.keys.add(call.headers["Idempotency-Key"])
        assert call.headers["Headrace-Lane"] == "batch"
        await asyncio.sleep(self.chance.uniform(0.0, 0.004))
        if self.chance.random() < self.trouble:
            raise self.chance.choice([Overloaded("", retry_after_s=0.0), ServiceFailure("")])
        if body.get("bad"):
            raise Forbidden("no", code="model_not_allowed")
        self.answered[body["prompt"]] += 1
        await call.send({"type": "http.response.start", "status": 200, "headers": []})
        await call.send({"type": "http.response.body", "body": msgspec.json.encode({"text": body["prompt"]})})

    async def open(self) -> "World":
        await self.library.open()
        await self.store.open()
        await self.journal.open()
        return self

    async def batch(self, num_lines: int, num_bad: int = 0, window_s: int = 10_000) -> BatchRecord:
        draft = await self.library.begin(owner_token(OWNER), "in", 0, 10**7)
        for number in range(num_lines):
            body = {"model": "m", "prompt": f"p{number}", "bad": number < num_bad}
            told = {"custom_id": f"c{number}", "method": "POST", "url": URL, "body": body}
            await draft.write(json.dumps(told).encode() + b"\n")
        file = await self.library.finish(draft, "batch", 86_400)
        record = BatchRecord(
            batch_id="batch_1",
            owner=OWNER,
            key_id="",
            endpoint=URL,
            input_file_id=file.file_id,
            created_at=int(self.now),
            expires_at=int(self.now) + window_s,
            output_life_s=3600,
        )
        await self.store.create(record)
        return record

    async def take(self, record: BatchRecord) -> BatchRun:
        record = await self.store.change(record, lambda now: taken(now, now.epoch + 1, self.now))
        return BatchRun(record, self.parts)

    async def record(self) -> BatchRecord:
        kept = await self.store.get(OWNER, "batch_1")
        assert kept is not None
        return kept.record

    async def lines(self, file_id: str) -> list[dict[str, object]]:
        if not file_id:
            return []
        stored = await self.library.stored(owner_token(OWNER), file_id)
        async with aclosing(self.library.content(stored)) as pieces:
            content = b"".join([piece async for piece in pieces])
        return [json.loads(text) for text in content.splitlines()]
