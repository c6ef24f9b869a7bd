"""Two routers: what one leaves, the other goes on with; and both together work on each batch once."""

import asyncio
from collections import Counter

from headrace_shared.messages import FinishReason, Request
from tests.router.batches.batch_support import batch_worker, create, line, lines_of, until_status
from tests.router.resumable import two_routers
from tests.router.support import ScriptedWorker, prompt_of, says, until


async def test_a_router_that_drains_hands_its_batches_over() -> None:
    slow = says("answer", FinishReason.STOP, pause_s=0.01)
    async with two_routers(slow, batch_concurrency=4) as routers, batch_worker(routers.a, slow) as worker:
        batches = [await create(routers.a.client, [line(n, f"{b} {n}") for n in range(20)]) for b in range(3)]
        await until(lambda: len(worker.requests) > 20)
        routers.a.service.drain()
        for batch in batches:
            done = await until_status(routers.b.client, batch, "completed")
            assert done["request_counts"] == {"total": 20, "completed": 20, "failed": 0}
            output = await lines_of(routers.b.client, done["output_file_id"])
            assert len(output) == 20
            assert {one["response"]["body"]["choices"][0]["text"] for one in output.values()} == {"answer"}
        # What was under way went on: nothing ran twice.
        assert set(Counter(tuple(prompt_of(request)) for request in worker.requests).values()) == {1}


async def test_a_batch_is_seen_and_cancelled_at_any_router() -> None:
    async def script(worker: ScriptedWorker, request: Request) -> None:
        await asyncio.sleep(3600)

    async with two_routers(script) as routers, batch_worker(routers.a, script) as worker:
        batches = [await create(routers.a.client, [line(n) for n in range(4)]) for _ in range(2)]
        await until(lambda: len(worker.requests) == 8)
        for batch in batches:
            await routers.b.client.post(f"/v1/batches/{batch['id']}/cancel")
            done = await until_status(routers.a.client, batch, "cancelled")
            assert done["request_counts"] == {"total": 4, "completed": 0, "failed": 4}
        await until(lambda: len({cancel.request_id for cancel in worker.cancels}) == 8)
