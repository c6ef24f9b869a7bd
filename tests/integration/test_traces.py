"""Traces of real processes, as a collector gets them."""

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from headrace_shared.broker import NatsServer
from headrace_shared.bus import Message
from headrace_shared.nats_bus import NatsBus
from tests.integration.deployment import Client, Deployment, until, until_status
from tests.otlp_receiver import OtlpReceiver, ReceivedSpan, assert_connected

pytestmark = pytest.mark.nats

MARKER = "zanzibarquince"
"""Stands for what must be in no trace, log or metric."""
KEY = "sk-marker-0123456789abcdef"
TRACE_ID, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"TraceParent": f"00-{TRACE_ID}-{CALLER}-01", "Authorization": f"Bearer {KEY}"}
REQUESTS = "requests.{model}.{lane}.{partition}"


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[OtlpReceiver]:
    """Every process that is started after this sends its spans there."""
    with OtlpReceiver.running() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-collector-key=open-sesame")
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        yield receiver


def body_of(text: str, max_tokens: int, **more: object) -> dict[str, object]:
    script = json.dumps({"echo": text})
    messages = [{"role": "user", "content": f"{MARKER} {script}"}]
    return {"model": "scripted", "messages": messages, "max_tokens": max_tokens, "stop": [f"{MARKER}-stop"], **more}


async def received(collector: OtlpReceiver, *names: str) -> list[ReceivedSpan]:
    """All spans of the caller's trace, once those of these names have come."""

    def is_there() -> bool:
        seen = [span.name for span in collector.trace(TRACE_ID)]
        return all(seen.count(name) >= names.count(name) for name in names)

    await until(is_there, what=f"spans {names}")
    await asyncio.sleep(0.5)  # others may be on their way
    return collector.trace(TRACE_ID)


def only(spans: list[ReceivedSpan], name: str) -> ReceivedSpan:
    found = [span for span in spans if span.name == name]
    assert len(found) == 1, [span.name for span in spans]
    return found[0]


async def test_a_request_is_one_trace(collector: OtlpReceiver, deployment: Deployment) -> None:
    url = await deployment.router(model="scripted")
    await deployment.scheduler()
    await deployment.worker(engine="tests.scripted_text", step_s=0.01)
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        await until_status(http, "/health", 200)
        chat = body_of("abc", 12, temperature=0.5, seed=7, stream=True)
        reply = await http.post("/v1/chat/completions", json=chat, headers=HEADERS)
        assert reply.status_code == 200 and reply.text.endswith("data: [DONE]\n\n"), reply.text
        begun = (
            "POST /v1/chat/completions",
            "chat scripted",
            "prepare",
            f"publish {REQUESTS}",
            "queue",
            f"receive {REQUESTS}",
            f"process {REQUESTS}",
            "place",
            "process grants.{worker}",
            "prefill",
            "decode",
            f"ack {REQUESTS}",
        )
        spans = await received(collector, *begun)
        assert sorted(span.name for span in spans) == sorted(begun)
        assert_connected(spans, root_parent=CALLER)
        names = {span.span_id: span.name for span in spans}
        tree = {span.name: (span.kind, names.get(span.parent_id)) for span in spans}
        assert tree == {
            "POST /v1/chat/completions": ("server", None),
            "chat scripted": ("internal", "POST /v1/chat/completions"),
            "prepare": ("internal", "chat scripted"),
            f"publish {REQUESTS}": ("producer", "chat scripted"),
            "queue": ("internal", f"publish {REQUESTS}"),
            f"receive {REQUESTS}": ("client", f"publish {REQUESTS}"),
            f"process {REQUESTS}": ("consumer", f"publish {REQUESTS}"),
            "place": ("internal", f"process {REQUESTS}"),
            "process grants.{worker}": ("consumer", f"publish {REQUESTS}"),
            "prefill": ("internal", "process grants.{worker}"),
            "decode": ("internal", "process grants.{worker}"),
            f"ack {REQUESTS}": ("client", f"process {REQUESTS}"),
        }
        services = {span.service for span in spans}
        assert services == {"headrace-router", "headrace-scheduler", "headrace-worker"}

        server = only(spans, "POST /v1/chat/completions").attributes
        assert server["http.request.method"] == "POST" and server["http.response.status_code"] == 200
        assert server["http.route"] == "/v1/chat/completions"
        inference = only(spans, "chat scripted")
        expected = {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "headrace",
            "gen_ai.request.model": "scripted",
            "gen_ai.response.model": "scripted",
            "gen_ai.request.temperature": 0.5,
            "gen_ai.request.seed": 7,
            "gen_ai.request.max_tokens": 12,
            "gen_ai.request.stream": True,
            "gen_ai.request.choice.count": 1,
            "gen_ai.response.finish_reasons": ["length"],
            "gen_ai.usage.output_tokens": 12,
            "headrace.outcome": "finished",
        }
        assert expected.items() <= inference.attributes.items(), inference.attributes
        assert "first_token" in inference.events and "detokenized" in inference.events
        assert 0 < inference.attributes["gen_ai.response.time_to_first_chunk"] < inference.end - inference.start
        publish = only(spans, f"publish {REQUESTS}").attributes
        assert publish["messaging.system"] == "nats" and publish["messaging.operation.type"] == "send"
        assert publish["messaging.destination.template"] == REQUESTS
        assert publish["messaging.destination.name"].startswith("requests.scripted.interactive.")
        assert publish["messaging.message.id"] == inference.attributes["headrace.request.id"]
        decode = only(spans, "decode")
        assert decode.start >= only(spans, "prefill").end - 0.001 and decode.end - decode.start > 0.05
        assert not any(span.is_error for span in spans)

        iterations = [span for span in collector.spans if span.name == "iteration"]
        assert iterations and all(span.parent_id == "" for span in iterations)
        assert any(TRACE_ID in span.links for span in iterations)
        assert "open-sesame" in collector.headers[0].values()
        metrics = (await http.get("/metrics")).text
    assert 'headrace_spans_exported_total{result="ok"}' in metrics
    raw = b"".join(collector.raw)
    logs = "".join(deployment.log(name) for name in deployment.processes)
    for secret in (MARKER, KEY, "open-sesame"):
        assert secret not in logs + metrics and secret.encode() not in raw, secret


async def test_content_is_recorded_for_who_asks_for_it(collector: OtlpReceiver, deployment: Deployment) -> None:
    url = await deployment.router(model="scripted", trace_content=True)
    await deployment.scheduler()
    await deployment.worker(engine="tests.scripted_text", step_s=0.002)
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        await until_status(http, "/health", 200)
        reply = await http.post("/v1/chat/completions", json=body_of("abc", 6), headers=HEADERS)
        assert reply.status_code == 200
    attributes = only(await received(collector, "chat scripted"), "chat scripted").attributes
    asked, answered = (json.loads(attributes[f"gen_ai.{way}.messages"]) for way in ("input", "output"))
    assert asked[0]["role"] == "user" and MARKER in asked[0]["parts"][0]["content"]
    (answer,) = answered
    assert (answer["parts"][0]["content"], answer["finish_reason"]) == ("abcabc", "length")
    assert MARKER not in deployment.log("router-1")


async def test_a_migration_and_a_new_scheduler_stay_in_the_trace(
    collector: OtlpReceiver, deployment: Deployment
) -> None:
    url = await deployment.router(model="scripted")
    await deployment.scheduler("scheduler-1")
    await deployment.worker("worker-1", engine="tests.scripted_text", step_s=0.03)
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        await until_status(http, "/health", 200)
        chat = http.post("/v1/chat/completions", json=body_of("abc", 200), headers=HEADERS)
        call = asyncio.create_task(chat)
        await received(collector, "place")
        await deployment.worker("worker-2", engine="tests.scripted_text", step_s=0.03)
        await until(lambda: '"ready"' in deployment.log("worker-2"), what="second worker")
        await asyncio.sleep(0.5)
        await deployment.kill("worker-1")
        await received(collector, "migration")
        await deployment.scheduler("scheduler-2")
        await until(lambda: '"ready"' in deployment.log("scheduler-2"), what="second scheduler")
        await deployment.kill("scheduler-1")
        reply = await call
        assert reply.status_code == 200 and reply.json()["usage"]["completion_tokens"] == 200
    spans = await received(collector, "chat scripted", "process progress.{scheduler}", f"ack {REQUESTS}", "decode")
    assert_connected(spans, root_parent=CALLER)
    migration = only(spans, "migration").attributes
    assert (migration["headrace.worker.previous_id"], migration["headrace.worker.id"]) == ("worker-1", "worker-2")
    assert migration["headrace.attempt"] == 1 and migration["headrace.output_tokens"] > 0
    assert only(spans, "process progress.{scheduler}").instance == "scheduler-2"
    assert only(spans, f"ack {REQUESTS}").instance == "scheduler-2"
    assert only(spans, "process grants.{worker}").instance == "worker-2"


class TracingBroker(NatsServer):
    """Reads `traceparent` itself, and tells where sampled messages went."""

    def _render(self) -> str:
        user = 'jetstream: enabled, users: [{user: a, password: b}], msg_trace: {dest: "told", sampling: 100}'
        return super()._render() + f"accounts {{ A: {{ {user} }} }}\nno_auth_user: a\n"


async def test_the_context_survives_a_broker_that_traces_by_the_header(collector: OtlpReceiver, tmp_path: Path) -> None:
    server = TracingBroker(tmp_path / "tracing-nats", sync_interval="100ms")
    await server.start()
    deployment = Deployment(server, tmp_path)
    bus = await NatsBus.connect(server.url, name="listener", on_closed=lambda: None)
    told: list[Message] = []
    try:
        await bus.subscribe("told", told.append)
        url = await deployment.router(model="scripted")
        await deployment.scheduler()
        await deployment.worker(engine="tests.scripted_text", step_s=0.005)
        async with httpx.AsyncClient(base_url=url, timeout=60) as http:
            await until_status(http, "/health", 200)
            reply = await http.post("/v1/chat/completions", json=body_of("abc", 5), headers=HEADERS)
            assert reply.status_code == 200
        spans = await received(collector, "chat scripted", f"ack {REQUESTS}", "decode")
        assert_connected(spans, root_parent=CALLER)
        await until(lambda: any(TRACE_ID.encode() in message.data for message in told), what="the broker's own trace")
    finally:
        await bus.close()
        await deployment.close()
        await server.stop()


@pytest.mark.parametrize("where", ["closed", "silent"])
async def test_an_unreachable_collector_costs_nothing(
    where: str, deployment: Deployment, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = await asyncio.get_running_loop().create_server(asyncio.Protocol, "127.0.0.1", 0)
    port = silent.sockets[0].getsockname()[1]
    if where == "closed":
        silent.close()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    try:
        url = await deployment.router("router-1", model="scripted")
        await deployment.scheduler("scheduler-1")
        await deployment.worker("worker-1", engine="tests.scripted_text", step_s=0.002)
        async with httpx.AsyncClient(base_url=url, timeout=60) as http:
            await until_status(http, "/health", 200)
            for _ in range(10):
                reply = await http.post("/v1/chat/completions", json=body_of("abc", 5), headers=HEADERS)
                assert reply.status_code == 200
                await asyncio.sleep(0.1)
        for name in ("router-1", "worker-1", "scheduler-1"):
            began_at = time.monotonic()
            assert await deployment.stop(name) == 0
            assert time.monotonic() - began_at < 25.0, name  # without a collector in the way: about 1
            log = deployment.log(name)
            assert log.count("traces do not reach the collector") <= 1 and "Traceback" not in log, log
    finally:
        silent.close()
