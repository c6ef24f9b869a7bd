"""Background responses: followed, cancelled, deleted, and taken over from a router that died."""

import asyncio
import json
from typing import Any

import httpx

from headrace_router.settings import RouterSettings
from headrace_shared.bus import Bus
from headrace_shared.memory_bus import MemoryBroker, MemoryBus
from headrace_shared.messages import CancelReason, Outcome, Request
from headrace_shared.subjects import RESPONSES
from tests.byte_model import byte_ids
from tests.router.responses_api.client import (
    PATH,
    body,
    create,
    events_of,
    forget_tokens,
    in_steps,
    retrieve,
    text_of,
    until_none_is_unfinished,
)
from tests.router.resumable import two_routers
from tests.router.support import ScriptedWorker, running_router, says, until


async def test_a_background_response_is_there_when_it_has_ended() -> None:
    gate = asyncio.Event()
    async with two_routers(in_steps("the tin is open", gate)) as routers:
        made = await create(routers.a.client, background=True, stop="zz")
        assert made["status"] == "queued" and made["output"] == [] and made["background"]
        await retrieve_while_running(routers.b.client, made["id"])
        early = await routers.b.client.post(PATH, json=body(previous_response_id=made["id"]))
        assert early.json()["error"]["code"] == "previous_response_not_finished"
        gate.set()
        ended = await retrieve(routers.b.client, made["id"], "completed")
        assert text_of(ended) == "the tin is open" and ended["usage"]["output_tokens"] == 16
        assert ended["created_at"] == made["created_at"]
        assert (await routers.a.client.post(f"{PATH}/{made['id']}/cancel")).json() == ended
        await until_none_is_unfinished(routers.a)


async def retrieve_while_running(client: httpx.AsyncClient, response_id: str) -> None:
    async with asyncio.timeout(5.0):
        while True:
            response = (await client.get(f"{PATH}/{response_id}")).json()
            assert response["output"] == [] and response["usage"] is None
            if response["status"] == "in_progress":
                return
            assert response["status"] == "queued"
            await asyncio.sleep(0.01)


async def test_the_events_behind_every_number_are_the_same_when_the_token_log_is_gone() -> None:
    gate = asyncio.Event()
    gate.set()
    async with two_routers(in_steps("안녕 the tin 🦉!", gate)) as routers:
        reply = await routers.a.client.post(PATH, json=body(background=True, stream=True))
        events = events_of(reply.text)
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert text_of(events[-1]["response"]) == "안녕 the tin 🦉!"
        response_id = events[-1]["response"]["id"]
        await retrieve(routers.b.client, response_id, "completed")
        await forget_tokens(routers.a)
        for number in range(-1, len(events)):
            again = await routers.b.client.get(f"{PATH}/{response_id}?stream=true&starting_after={number}")
            rest = events_of(again.text)
            if rest:
                rest[-1]["response"]["completed_at"] = events[-1]["response"]["completed_at"]
            assert rest == events[number + 1 :]


async def test_a_stream_that_breaks_goes_on_at_another_router() -> None:
    gate = asyncio.Event()
    async with two_routers(in_steps("the tin is open at last", gate)) as routers:
        told: list[dict[str, Any]] = []
        async with routers.a.client.stream("POST", PATH, json=body(background=True, stream=True)) as reply:
            async for line in reply.aiter_lines():
                if line.startswith("data: "):
                    told.append(json.loads(line.removeprefix("data: ")))
                    if told[-1]["type"] == "response.output_text.delta":
                        break
        response_id = told[0]["response"]["id"]
        number = told[-1]["sequence_number"]
        following = asyncio.create_task(
            routers.b.client.get(f"{PATH}/{response_id}?stream=true&starting_after={number}")
        )
        await asyncio.sleep(0.1)
        gate.set()
        told += events_of((await following).text)
        assert [event["sequence_number"] for event in told] == list(range(len(told)))
        assert "".join(event.get("delta", "") for event in told) == "the tin is open at last"
        assert text_of(await retrieve(routers.a.client, response_id, "completed")) == "the tin is open at last"


async def test_cancelling_ends_the_work_and_the_streams() -> None:
    gate = asyncio.Event()
    async with two_routers(in_steps("never told", gate)) as routers:
        made = await create(routers.a.client, background=True)
        following = asyncio.create_task(routers.b.client.get(f"{PATH}/{made['id']}?stream=true"))
        await retrieve_while_running(routers.b.client, made["id"])
        cancelled = (await routers.b.client.post(f"{PATH}/{made['id']}/cancel")).json()
        assert cancelled["status"] == "cancelled"
        worker = routers.a.worker
        await until(lambda: any(cancel.reason is CancelReason.CLIENT for cancel in worker.cancels))
        events = events_of((await following).text)
        assert events[-1]["response"]["status"] == "cancelled" and events[-1]["type"] == "response.incomplete"
        again = await routers.a.client.post(f"{PATH}/{made['id']}/cancel")
        assert again.json() == cancelled == (await routers.a.client.get(f"{PATH}/{made['id']}")).json()
        await until(lambda: routers.ended() != [] and routers.ended()[-1].outcome is Outcome.CANCELLED)
        foreground = asyncio.create_task(create(routers.a.client))
        await asyncio.sleep(0.05)
        gate.set()
        reply = await routers.a.client.post(f"{PATH}/{(await foreground)['id']}/cancel")
        assert reply.status_code == 400


async def test_deleting_what_runs_cancels_it() -> None:
    gate = asyncio.Event()
    async with running_router(in_steps("never told", gate)) as router:
        made = await create(router.client, background=True)
        await retrieve_while_running(router.client, made["id"])
        assert (await router.client.delete(f"{PATH}/{made['id']}")).json()["deleted"]
        await until(lambda: any(cancel.reason is CancelReason.CLIENT for cancel in router.worker.cancels))
        await until_none_is_unfinished(router)
        assert (await router.client.get(f"{PATH}/{made['id']}")).status_code == 404


async def test_a_failure_in_the_background_is_kept() -> None:
    async def fails(worker: ScriptedWorker, request: Request) -> None:
        worker.frame(request, byte_ids("ab"), 0)
        await worker.end(request, Outcome.FAILED, "internal_error", "The worker broke.")

    async with two_routers(fails) as routers:
        made = await create(routers.a.client, background=True)
        failed = await retrieve(routers.b.client, made["id"], "failed")
        assert failed["error"] == {"code": "server_error", "message": "The worker broke."}
        events = events_of((await routers.b.client.get(f"{PATH}/{made['id']}?stream=true")).text)
        assert [event["type"] for event in events[-2:]] == ["error", "response.failed"]
        assert "".join(event.get("delta", "") for event in events) == "ab"
        reply = await routers.a.client.post(PATH, json=body(stream=True))
        assert [event["type"] for event in events_of(reply.text)[-2:]] == ["error", "response.failed"]
        whole = await routers.a.client.post(PATH, json=body())
        assert whole.status_code == 500 and whole.json()["error"]["message"] == "The worker broke."


async def test_a_client_that_leaves_before_its_response_began_leaves_no_work_behind() -> None:
    class SlowToStore(MemoryBus):
        async def create(self, bucket: str, key: str, value: bytes) -> int:
            if bucket == RESPONSES.name:
                await asyncio.Event().wait()
            return await super().create(bucket, key, value)

    broker = MemoryBroker()
    async with running_router(
        in_steps("the tin", asyncio.Event()), buses=(SlowToStore(broker), MemoryBus(broker))
    ) as router:
        leaving = asyncio.create_task(create(router.client, background=True))
        await until(lambda: bool(router.worker.requests))
        leaving.cancel()
        await until(lambda: bool(router.worker.cancels))
        assert router.worker.cancels[0].request_id == router.worker.requests[0].request_id


async def test_what_a_dead_router_has_left_is_read_to_its_end() -> None:
    gate = asyncio.Event()
    broker = MemoryBroker()

    def buses() -> tuple[Bus, Bus]:
        return MemoryBus(broker), MemoryBus(broker)

    settings = RouterSettings(port=0, drain_delay_s=0.0, drain_timeout_s=2.0)
    async with running_router(says("ok"), buses=buses(), settings=settings, has_worker=False) as b:
        worker = ScriptedWorker(MemoryBus(broker), in_steps("the tin is open", gate))
        working = asyncio.create_task(worker.run())
        await until(lambda: worker.has_started)
        async with running_router(says("ok"), buses=buses(), settings=settings, has_worker=False) as a:
            made = await create(a.client, background=True)
            await retrieve_while_running(a.client, made["id"])
        gate.set()
        ended = await retrieve(b.client, made["id"], "completed")
        assert text_of(ended) == "the tin is open"
        assert not [cancel for cancel in worker.cancels if cancel.reason is not CancelReason.STOP]
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
