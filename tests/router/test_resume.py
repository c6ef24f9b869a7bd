"""A client that comes back, at whichever router, gets exactly what it missed."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from headrace_shared.messages import Audience, CancelReason, FinishReason, Request, TokenFrame
from headrace_shared.subjects import TOKENS
from tests.byte_model import END, byte_ids
from tests.router.resumable import CHAT, HELD_ID, RESUMABLE, TEXT, Event, body, events_of, parse, two_routers
from tests.router.scripts import endless
from tests.router.support import Router, Script, ScriptedWorker, says, until

WORDS = "안녕 🦉 the tin ther! stop here"


async def live_events(reply: httpx.Response) -> AsyncIterator[Event]:
    rest = ""
    async for text in reply.aiter_text():
        *blocks, rest = (rest + text).split("\n\n")
        for block in blocks:
            if (event := parse(block)) is not None:
                yield event


def several(text: str, num_choices: int = 2, pause_s: float = 0.0) -> Script:
    """Choices that differ in length, told in frames of one to three tokens, turn by turn."""

    async def script(worker: ScriptedWorker, request: Request) -> None:
        answers = [[*byte_ids(text), END], [*byte_ids(text[: len(text) // 2]), END]]
        index = [0] * request.num_choices
        size = 0
        while any(index[choice] < len(answers[choice]) for choice in range(request.num_choices)):
            for choice in range(request.num_choices):
                size = size % 3 + 1
                tokens = answers[choice][index[choice] : index[choice] + size]
                if tokens:
                    is_end = index[choice] + len(tokens) == len(answers[choice])
                    finish = FinishReason.STOP if is_end else None
                    worker.frame(request, tokens, index[choice], choice=choice, finish=finish, num_cached=1)
                    index[choice] += len(tokens)
            await asyncio.sleep(pause_s)

    return script


async def test_ids_are_sent_only_to_clients_that_ask() -> None:
    async with two_routers(says("abc")) as routers:
        for headers, has_ids in (({}, False), ({"Headrace-Resumable": "false"}, False), (RESUMABLE, True)):
            reply = await routers.a.client.post(CHAT, json=body(CHAT), headers=headers)
            events = events_of(reply.text)
            assert all((event.id is not None) is has_ids for event in events[:-1])
            assert (HELD_ID in reply.headers) is has_ids
            assert events[-1] == Event(None, "[DONE]")


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 2, "stream_options": {"include_usage": True}},
        {"n": 2, "stop": ["stop"], "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        {"n": 2, "stop": ["er!"], "include_stop_str_in_output": True, "logprobs": True},
        {"n": 2, "max_tokens": 2},
    ],
    ids=["one", "usage", "stop", "logprobs", "short"],
)
async def test_from_every_event_on_the_rest_is_the_same(fields: dict[str, Any]) -> None:
    async with two_routers(several(WORDS)) as routers:
        for path in (CHAT, TEXT):
            asked = fields | ({"logprobs": 2} if path == TEXT and "logprobs" in fields else {})
            reply = await routers.a.client.post(path, json=body(path, **asked), headers=RESUMABLE)
            events = events_of(reply.text)
            assert len(events) > 4
            held = f"/v1/requests/{reply.headers[HELD_ID]}"
            assert events_of((await routers.b.client.get(held)).text) == events
            for number, event in enumerate(events[:-1]):
                assert event.id is not None
                again = await routers.b.client.get(held, headers={"Last-Event-ID": event.id})
                assert again.status_code == 200, again.text
                assert events_of(again.text) == events[number + 1 :]


async def test_a_break_while_tokens_come() -> None:
    fields = {"n": 2, "stream_options": {"include_usage": True}, "logprobs": True}
    async with two_routers(several(WORDS, pause_s=0.005)) as routers:
        reply = await routers.a.client.post(CHAT, json=body(CHAT, **fields, seed=1), headers=RESUMABLE)
        expected = [event.data for event in events_of(reply.text)]
        own, other = reply.headers[HELD_ID], ""
        got: list[Event] = []
        for turn in range(6):
            router = (routers.a, routers.b)[turn % 2]
            if not got:
                stream = router.client.stream("POST", CHAT, json=body(CHAT, **fields, seed=1), headers=RESUMABLE)
            else:
                last = {"Last-Event-ID": got[-1].id or ""}
                stream = router.client.stream("GET", f"/v1/requests/{other}", headers=last)
            async with stream as live:
                assert live.status_code == 200
                other = live.headers[HELD_ID]
                async for event in live_events(live):
                    got.append(event)
                    if turn < 5 and len(got) % 4 == 3:
                        break
        as_first = [event.data.replace(other, own) for event in got]
        created = expected[0].split('"created":')[1].split(",")[0]
        assert [data.replace(_created(data), created) for data in as_first] == expected
        assert not routers.a.worker.cancels
        assert {request.audience for request in routers.a.worker.requests} == {Audience.ATTACHED}


def _created(data: str) -> str:
    return data.split('"created":')[1].split(",")[0] if "created" in data else "\0"


async def leave_early(router: Router, **fields: Any) -> tuple[str, str]:
    """(id of the request, id of the last event)"""
    async with router.client.stream("POST", CHAT, json=body(CHAT, **fields), headers=RESUMABLE) as reply:
        async for event in live_events(reply):
            assert event.id is not None
            return reply.headers[HELD_ID], event.id
    raise AssertionError("no event")


async def test_nobody_comes_back() -> None:
    async with two_routers(endless, reattach_timeout_s=0.8) as routers:
        await leave_early(routers.a)
        await asyncio.sleep(0.4)
        assert not routers.a.worker.cancels
        await until(lambda: bool(routers.a.worker.cancels), 4.0)
        await until(lambda: [event.outcome.value for event in routers.ended()] == ["cancelled"])


async def test_a_client_at_another_router_keeps_it_alive_and_then_none_does() -> None:
    async with two_routers(endless, reattach_timeout_s=1.0) as routers:
        request_id, last = await leave_early(routers.a)
        async with routers.b.client.stream(
            "GET", f"/v1/requests/{request_id}", headers={"Last-Event-ID": last}
        ) as reply:
            events = live_events(reply)
            async with asyncio.timeout(5.0):
                for _ in range(150):
                    await anext(events)
            assert not routers.a.worker.cancels
        await until(lambda: bool(routers.a.worker.cancels), 8.0)


async def test_what_runs_in_the_background_is_left_alone() -> None:
    async def script(worker: ScriptedWorker, request: Request) -> None:
        await asyncio.sleep(1.2)
        await says("done")(worker, request)

    async with two_routers(script, reattach_timeout_s=0.3) as routers:
        with pytest.raises(httpx.ReadTimeout):
            await routers.a.client.post(TEXT, json=body(TEXT, stream=False, background=True), timeout=0.3)
        assert routers.a.worker.requests[0].audience is Audience.NONE
        await until(lambda: bool(routers.ended()))
        assert not routers.a.worker.cancels
        answer = await routers.b.client.get(f"/v1/requests/{routers.a.worker.requests[0].request_id}")
        assert answer.json()["choices"][0]["text"] == "done"


async def test_a_stop_string_ends_what_runs_in_the_background_though_nobody_listens() -> None:
    async def script(worker: ScriptedWorker, request: Request) -> None:
        await asyncio.sleep(0.6)
        for index, token in enumerate(byte_ids("one two three " * 100)):
            worker.frame(request, [token], index)
            await asyncio.sleep(0.01)

    async with two_routers(script, reattach_timeout_s=0.3) as routers:
        with pytest.raises(httpx.ReadTimeout):
            asked = body(TEXT, stream=False, background=True, stop=["two"])
            await routers.a.client.post(TEXT, json=asked, timeout=0.3)
        await until(lambda: bool(routers.a.worker.cancels))
        [cancel] = routers.a.worker.cancels
        assert (cancel.choice, cancel.reason) == (0, CancelReason.STOP)
        answer = await routers.b.client.get(f"/v1/requests/{cancel.request_id}")
        assert answer.json()["choices"][0]["text"] == "one "


async def test_cancelling_for_good() -> None:
    async with two_routers(endless) as routers:
        request_id, last = await leave_early(routers.a)
        assert (await routers.b.client.post(f"/v1/requests/{request_id}/cancel")).json()["status"] == "cancelling"
        await until(lambda: bool(routers.ended()))
        reply = await routers.b.client.get(f"/v1/requests/{request_id}", headers={"Last-Event-ID": last})
        [*_, error, done] = events_of(reply.text)
        assert '"code":"cancelled"' in error.data and done.data == "[DONE]"


async def test_what_has_ended_is_not_said_to_be_cancelling() -> None:
    async with two_routers(says("abc")) as routers:
        answer = await routers.a.client.post(TEXT, json=body(TEXT, stream=False), headers=RESUMABLE)
        path = f"/v1/requests/{answer.headers[HELD_ID]}"
        assert (await routers.b.client.post(f"{path}/cancel")).json()["status"] == "completed"
        assert not routers.a.worker.cancels
        assert (await routers.b.client.get(path)).json() == answer.json()


async def test_who_may_come_back() -> None:
    async with two_routers(says("abc")) as routers:
        own = {"Authorization": "Bearer one"}
        reply = await routers.a.client.post(CHAT, json=body(CHAT), headers=RESUMABLE | own)
        path = f"/v1/requests/{reply.headers[HELD_ID]}"
        assert events_of((await routers.b.client.get(path, headers=own)).text) == events_of(reply.text)
        for strange in (path, "/v1/requests/" + "0" * 32, "/v1/requests/x.*"):
            refused = await routers.b.client.get(strange, headers={"Authorization": "Bearer two"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (404, "request_not_found")
            assert (await routers.b.client.post(strange + "/cancel")).status_code == 404
        other = await routers.a.client.post(CHAT, json=body(CHAT), headers=RESUMABLE | own)
        foreign = events_of(other.text)[0].id or ""
        for wrong in ("x", "1", foreign, foreign.split(".")[0] + ".1.2", "9" * 5000):
            refused = await routers.b.client.get(path, headers=own | {"Last-Event-ID": wrong})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "Last-Event-ID")


async def test_an_answer_that_is_not_kept_any_more() -> None:
    async with two_routers(says("abc")) as routers:
        reply = await routers.a.client.post(CHAT, json=body(CHAT), headers=RESUMABLE)
        await until(lambda: not routers.a.broker.streams["REQUESTS"].stored)
        routers.a.broker.streams[TOKENS.name].stored.clear()
        again = await routers.b.client.get(f"/v1/requests/{reply.headers[HELD_ID]}")
        assert (again.status_code, again.json()["error"]["code"]) == (410, "answer_expired")


async def test_a_log_without_its_beginning_is_no_answer() -> None:
    async with two_routers(endless) as routers:
        request_id, last = await leave_early(routers.a)
        stored = routers.a.broker.streams[TOKENS.name].stored
        await until(lambda: len(stored) > 10)
        stored.popitem(last=False)
        reply = await routers.b.client.get(f"/v1/requests/{request_id}", headers={"Last-Event-ID": last})
        assert (reply.status_code, reply.json()["error"]["code"]) == (410, "answer_expired")


async def test_coming_back_before_there_is_a_token() -> None:
    async def script(worker: ScriptedWorker, request: Request) -> None:
        await asyncio.sleep(0.6)
        await says("abc")(worker, request)

    async with two_routers(script) as routers:
        with pytest.raises(httpx.ReadTimeout):
            await routers.a.client.post(TEXT, json=body(TEXT, stream=False), headers=RESUMABLE, timeout=0.2)
        path = f"/v1/requests/{routers.a.worker.requests[0].request_id}"
        assert (await routers.b.client.get(path)).json()["choices"][0]["text"] == "abc"


async def test_a_lost_frame_is_found_in_the_log() -> None:
    async def script(worker: ScriptedWorker, request: Request) -> None:
        tokens = byte_ids("abcdef")
        for index, token in enumerate(tokens):
            finish = FinishReason.LENGTH if index == 5 else None
            if index == 3:
                await asyncio.sleep(0.5)
            frame = TokenFrame(
                request_id=request.request_id, choice=0, attempt=0, index=index, tokens=(token,), finish=finish
            )
            worker.publish(request, frame)

    async with two_routers(script) as routers:
        request_id, last = await leave_early(routers.a)
        subscriptions = routers.a.broker.subscriptions
        get = asyncio.create_task(routers.b.client.get(f"/v1/requests/{request_id}", headers={"Last-Event-ID": last}))
        await until(lambda: any(s.subject.endswith(request_id) for s in subscriptions), 2.0)
        for subscription in list(routers.a.broker.subscriptions):
            if subscription.subject.endswith(request_id):
                await subscription.close()
        reply = await get
        assert '"finish_reason":"length"' in reply.text and reply.text.endswith("data: [DONE]\n\n")


async def test_a_drain_cuts_resumable_streams_and_tells_others() -> None:
    async with two_routers(endless) as routers:
        last: list[Event] = []

        async def listen() -> str:
            async with routers.b.client.stream("POST", CHAT, json=body(CHAT), headers=RESUMABLE) as reply:
                with pytest.raises(httpx.RemoteProtocolError):
                    async for event in live_events(reply):
                        last.append(event)
                return str(reply.headers[HELD_ID])

        plain = asyncio.create_task(routers.b.client.post(CHAT, json=body(CHAT)))
        listening = asyncio.create_task(listen())
        await until(lambda: bool(last))
        routers.b.service.drain()
        request_id = await asyncio.wait_for(listening, 10.0)
        assert '"code":"draining"' in (await plain).text
        assert last[-1].id is not None
        headers = {"Last-Event-ID": last[-1].id}
        async with routers.a.client.stream("GET", f"/v1/requests/{request_id}", headers=headers) as reply:
            event = await anext(live_events(reply))
            assert event.id is not None and int(event.id.split(".")[1]) == int(last[-1].id.split(".")[1]) + 1
        assert [cancel.request_id for cancel in routers.a.worker.cancels] != [request_id]
