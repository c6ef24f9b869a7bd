"""At the router's door: quick refusals with an honest time to come back, and who is let in all the same."""

import asyncio
import time
from typing import Any

import pytest
from msgspec.structs import replace

from headrace_router.capacities import Capacities
from headrace_router.models import Models
from headrace_router.promises import LATE_S
from headrace_router.settings import RouterSettings
from headrace_shared import telemetry
from headrace_shared.codec import decode, encode
from headrace_shared.errors import ModelNotFound, Overloaded
from headrace_shared.fleet_messages import Hello, Telemetry, WorkerState
from headrace_shared.messages import CancelReason, Outcome, Request, WorkerId
from headrace_shared.model_cards import store_card
from headrace_shared.subjects import hello_subject, telemetry_subject
from tests.byte_model import MODEL, make_card
from tests.router.endings import assert_clean
from tests.router.fleets import autoscaler_figures, load_of, loads, telling, waiting, worker_figures
from tests.router.support import Router, running_router, says, until

SETTINGS = RouterSettings(port=0, drain_delay_s=0.0, max_wait_s=10.0)
BODY = {"model": MODEL, "prompt": "a", "max_tokens": 10}


async def ask(router: Router, headers: dict[str, str] | None = None, **fields: Any) -> Any:
    return await router.client.post("/v1/completions", json={**BODY, **fields}, headers=headers)


async def metric(router: Router, line: str) -> float:
    text = (await router.client.get("/metrics")).text
    found = [row for row in text.splitlines() if row.startswith(line)]
    return float(found[0].rpartition(" ")[2]) if found else 0.0


async def test_who_would_wait_too_long_is_refused_at_once_and_nothing_is_queued() -> None:
    async with (
        running_router(says("ok"), settings=SETTINGS) as router,
        telling(router.worker.bus, worker_figures(0.02)),
        loads(router.worker.bus, load_of("router-2", waiting(400))),
    ):
        before = time.monotonic()
        reply = await ask(router)
        took_s = time.monotonic() - before
        assert reply.status_code == 503, reply.text
        error = reply.json()["error"]
        assert (error["code"], error["type"], error["param"]) == ("wait_too_long", "service_unavailable", None)
        assert 1 <= int(reply.headers["retry-after"]) <= 120
        assert took_s < SETTINGS.max_wait_s
        assert not router.worker.requests
        assert await metric(router, 'headrace_router_shed_total{model="tiny",reason="wait_too_long"}') == 1


async def test_the_same_queue_takes_who_has_time_and_refuses_who_has_not() -> None:
    settings = RouterSettings(port=0, drain_delay_s=0.0, max_wait_s=300.0)
    async with (
        running_router(says("ok"), settings=settings) as router,
        telling(router.worker.bus, worker_figures(0.02)),
        loads(router.worker.bus, load_of("router-2", waiting(100))),
    ):
        refused = await ask(router, {"Headrace-Timeout": "3"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "deadline_unreachable")
        assert (await ask(router)).status_code == 200


async def test_what_no_worker_could_ever_compute_is_refused_as_that_and_not_for_how_long_it_would_take() -> None:
    """The wait is one that a request within the context may join; the prompt alone would take an hour."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"x" * 100: "y" * 2_000_000}}}
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "a"}], "max_tokens": 10}
    async with (
        running_router(says("ok"), settings=SETTINGS) as router,
        telling(router.worker.bus, worker_figures(0.02)),
        loads(router.worker.bus, load_of("router-2", waiting(60))),
    ):
        assert (await ask(router, {"Headrace-Timeout": "1"})).status_code == 503
        for asked, param in (
            (chat | {"tools": [tool]}, "messages"),
            (chat | {"max_tokens": 2**31}, "max_tokens"),
            (chat | {"messages": [{"role": "user", "content": "z" * 2_000_000}]}, "messages"),
        ):
            reply = await router.client.post("/v1/chat/completions", json=asked)
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), reply.text
        reply = await ask(router, prompt=["z" * 2_000_000] * 2)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "prompt"), reply.text
        assert (await ask(router)).status_code == 200


async def test_the_queue_is_bounded_with_a_status_of_the_operators_choice() -> None:
    settings = RouterSettings(port=0, drain_delay_s=0.0, max_queued_requests=20, queue_full_status=529)
    async with (
        running_router(says("ok"), settings=settings) as router,
        telling(router.worker.bus, worker_figures(0.02)),
        loads(router.worker.bus, load_of("router-2", waiting(16))),
    ):
        reply = await ask(router)
        assert (reply.status_code, reply.json()["error"]["code"]) == (529, "queue_full")
        assert 1 <= int(reply.headers["retry-after"]) <= 120


async def test_who_comes_back_when_told_to_is_let_in_before_others() -> None:
    """The queue stands just above what fresh calls may use, and stays there."""
    settings = RouterSettings(port=0, drain_delay_s=0.0, max_queued_requests=20)
    async with (
        running_router(says("ok"), settings=settings) as router,
        telling(router.worker.bus, worker_figures(0.02)),
        loads(router.worker.bus, load_of("router-2", waiting(17, output_tokens=1))),
    ):
        refused = await ask(router, prompt="mine")
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) < LATE_S
        await asyncio.sleep(float(refused.headers["retry-after"]))
        assert (await ask(router, prompt="of somebody else")).status_code == 429
        assert (await ask(router, prompt="mine")).status_code == 200
        assert (await ask(router, prompt="mine")).status_code == 429  # a promise is kept once
        assert await metric(router, 'headrace_router_promises_total{model="tiny",outcome="kept"}') == 1


async def test_after_an_outage_of_the_broker_nobody_is_refused_for_workers_that_could_not_be_heard() -> None:
    async with (
        running_router(says("ok"), settings=SETTINGS) as router,
        telling(router.worker.bus, worker_figures(0.02)),
        telling(router.worker.bus, autoscaler_figures(MODEL, max_workers=2, start_s=60.0)),
    ):
        assert (await ask(router, {"Headrace-Timeout": "9"})).status_code == 200
        router.broker.stop()
        await asyncio.sleep(3.5)
        waits = asyncio.create_task(ask(router, {"Headrace-Timeout": "9"}))
        await asyncio.sleep(0.5)
        router.broker.start()
        assert (await waits).status_code == 200
        assert (await ask(router, {"Headrace-Timeout": "9"})).status_code == 200


async def test_without_figures_nobody_is_refused_for_a_wait_that_nobody_knows() -> None:
    async with (
        running_router(says("ok"), settings=SETTINGS) as router,
        loads(router.worker.bus, load_of("router-2", waiting(400))),
    ):
        assert (await ask(router)).status_code == 200


async def test_a_queued_request_whose_time_will_not_be_enough_is_shed() -> None:
    """Its estimate was fine when it came; then the others' requests in front of it became many."""
    async with (
        running_router(says("ok"), settings=SETTINGS) as router,
        telling(router.worker.bus, worker_figures(0.02)),
    ):
        router.worker.is_taking = False
        await asyncio.sleep(0.1)
        waits = asyncio.create_task(ask(router, {"Headrace-Timeout": "8"}))
        await until(lambda: len(router.broker.streams["REQUESTS"].stored) == 1)
        async with loads(router.worker.bus, load_of("router-2", waiting(900, sequence=0))):
            reply = await asyncio.wait_for(waits, 5.0)
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "deadline_unreachable")
        # Nine hundred answers of a second each, sixteen at a time: earlier it would be refused again.
        assert 30 <= int(reply.headers["retry-after"]) <= 120
        await assert_clean(router, Outcome.SHED)
        assert [cancel.reason for cancel in router.worker.cancels] == [CancelReason.SHED]


async def test_a_model_without_workers_is_refused_after_a_while_unless_somebody_can_start_one() -> None:
    settings = RouterSettings(port=0, drain_delay_s=0.0, no_worker_patience_s=0.0)
    async with running_router(says("ok"), settings=settings, has_worker=False) as router:
        reply = await ask(router)
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "no_worker")
        assert "retry-after" in reply.headers
        assert (await router.client.get("/health")).status_code == 503
        async with telling(router.worker.bus, autoscaler_figures(MODEL, max_workers=2)):
            assert (await router.client.get("/health")).json() == {"status": "ready", "workers": 0}
            waits = asyncio.create_task(ask(router))
            await until(lambda: len(router.broker.streams["REQUESTS"].stored) == 1)
            working = asyncio.create_task(router.worker.run())
            assert (await waits).status_code == 200
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)


async def test_a_model_that_nobody_has_seen_yet_is_listed_waited_for_and_wanted() -> None:
    async with running_router(says("ok")) as router:
        assert (await ask(router, model="big")).status_code == 404
        async with telling(router.worker.bus, autoscaler_figures("big", max_workers=1)):
            listed = (await router.client.get("/v1/models")).json()["data"]
            assert [model["id"] for model in listed] == [MODEL, "big"]
            waits = asyncio.create_task(ask(router, model="big", stream=True))
            heard: list[float] = []
            await router.worker.bus.subscribe(
                "telemetry.router.*",
                lambda message: heard.append(telemetry.of_model(telemetry.WANTED_OF, "big").encode() in message.data),
            )
            await until(lambda: any(heard))
            await store_card(router.worker.bus, make_card(model="big"))
            await until(lambda: len(router.broker.streams["REQUESTS"].stored) == 1)
            waits.cancel()
            await asyncio.gather(waits, return_exceptions=True)
            late = await ask(router, {"Headrace-Timeout": "0.2"}, model="other")
            assert late.status_code == 404


async def test_waiting_for_a_model_ends() -> None:
    async with (
        running_router(says("ok")) as router,
        telling(router.worker.bus, autoscaler_figures("big", max_workers=1, start_s=7.0)),
    ):
        reply = await ask(router, {"Headrace-Timeout": "0.3"}, model="big")
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "model_starting")
        assert 7 <= int(reply.headers["retry-after"]) <= 120


@pytest.mark.parametrize(
    ("headers", "fields"), [({"Headrace-Overflow": "true"}, {}), ({}, {"overflow": True})], ids=["header", "body"]
)
async def test_overflow_needs_consent_and_says_who_answered(headers: dict[str, str], fields: dict[str, Any]) -> None:
    settings = RouterSettings(port=0, drain_delay_s=0.0, overflow=("big=tiny",), overflow_above_s=5.0)
    async with running_router(says("ok"), settings=settings) as router:
        await store_card(router.worker.bus, make_card(model="big", context=200))
        async with telling(router.worker.bus, autoscaler_figures("big", max_workers=1, start_s=60.0)):
            for _ in range(3000):
                if "max_model_len" in (await router.client.get("/v1/models/big")).json():
                    break
                await asyncio.sleep(0.02)
            await _measure_big(router)
            reply = await ask(router, headers, model="big", **fields)
            assert reply.status_code == 200
            assert reply.json()["model"] == reply.headers["headrace-model"] == MODEL
            counted = 'headrace_router_overflow_total{answered_by="tiny",model="big"}'
            assert await metric(router, counted) == 1
            without = asyncio.create_task(ask(router, model="big"))
            await until(lambda: len(router.broker.streams["REQUESTS"].stored) == 1)
            without.cancel()
            await asyncio.gather(without, return_exceptions=True)
            asked = {"model": "big", "input": "x", **fields}
            embedding = asyncio.create_task(router.client.post("/v1/embeddings", json=asked, headers=headers))
            queue = router.broker.streams["REQUESTS"].stored
            await until(lambda: any(decode(message.data, Request).embeds for message, _ in queue.values()))
            embedding.cancel()
            await asyncio.gather(embedding, return_exceptions=True)
            assert await metric(router, counted) == 1, "another model's embedding is of no use"


async def test_who_cannot_wait_for_a_cold_start_is_refused_and_wakes_the_model_all_the_same() -> None:
    settings = RouterSettings(port=0, drain_delay_s=0.0, max_wait_s=5.0)
    async with running_router(says("ok"), settings=settings) as router:
        await store_card(router.worker.bus, make_card(model="big", context=200))
        heard: list[bool] = []
        wanted = telemetry.of_model(telemetry.WANTED_OF, "big").encode()
        await router.worker.bus.subscribe("telemetry.router.*", lambda message: heard.append(wanted in message.data))
        async with telling(router.worker.bus, autoscaler_figures("big", max_workers=1, start_s=60.0)):
            await _measure_big(router)
            await until(lambda: bool(heard))
            assert not any(heard)
            reply = await ask(router, model="big")
            assert (reply.status_code, reply.json()["error"]["code"]) == (503, "wait_too_long")
            await until(lambda: any(heard))


async def test_a_fresh_router_at_zero_tells_configured_models_from_unknown_ones() -> None:
    capacities = Capacities()
    models = Models(lambda: 10.0, capacities)
    with pytest.raises(Overloaded) as nothing_yet:
        await models.find("big", 1.0)
    assert nothing_yet.value.code == "no_model"
    capacities.on_figures(next(autoscaler_figures("big", max_workers=1)), 10.0)
    with pytest.raises(ModelNotFound):
        await models.find("other", 1.0)
    with pytest.raises(Overloaded) as starting:
        await models.find("big", 0.05)
    assert starting.value.code == "model_starting" and 1 <= starting.value.retry_after_s <= 120
    assert models.startable() == ["big"] and models.wanted() == {}


async def test_a_model_that_has_had_no_worker_yet_is_listed_and_shown() -> None:
    async with running_router(says("ok")) as router:
        async with telling(router.worker.bus, autoscaler_figures("org/big", max_workers=1)):
            listed: dict[str, Any] = {}
            async with asyncio.timeout(5.0):
                while "org/big" not in listed:
                    listed = {each["id"]: each for each in (await router.client.get("/v1/models")).json()["data"]}
            assert set(listed) == {MODEL, "org/big"}
            for name, described in listed.items():
                assert (await router.client.get(f"/v1/models/{name}")).json() == described
        assert (await router.client.get("/v1/models/org/small")).status_code == 404


async def _measure_big(router: Router) -> None:
    """The model had a worker some time ago: it is known how fast it was."""
    bus = router.worker.bus
    hello = Hello(
        worker=WorkerId("worker-9"),
        model="big",
        state=WorkerState.READY,
        epoch=1,
        num_blocks=64,
        block_size=16,
        context=200,
        max_sequences=4,
        tokens_per_iteration=256,
    )
    bus.publish(hello_subject("big", hello.worker), encode(hello))
    for figures, _ in zip(worker_figures(0.02), range(5), strict=False):
        told = Telemetry(service="worker", id="worker-9", state="ready", model="big", gauges=figures.gauges)
        bus.publish(telemetry_subject("worker", told.id), encode(told))
    await asyncio.sleep(0.05)
    bus.publish(hello_subject("big", hello.worker), encode(replace(hello, state=WorkerState.LEAVING)))
    await asyncio.sleep(0.05)
