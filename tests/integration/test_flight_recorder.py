"""The flight recorder of real schedulers, read with the commands that users have."""

import asyncio
import sys
from pathlib import Path

import pytest

from headrace_shared.broker import NatsServer
from headrace_shared.codec import decode, encode
from headrace_shared.messages import RequestId, SchedulerId
from headrace_shared.record_messages import Story, StoryQuery
from headrace_shared.subjects import story_query_subject, story_subject
from tests.integration.deployment import PROMPT, Client, Deployment, assert_complete, ended, until

pytestmark = pytest.mark.nats

NUM_TOKENS = 500


async def headrace(*arguments: str) -> tuple[int | None, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "headrace_cli",
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    return process.returncode, output.decode()


async def ask_for_story(client: Client, scheduler: str, request_id: RequestId) -> Story:
    """As the live page does."""
    told: list[Story] = []
    hearing = await client.bus.subscribe(
        story_subject(client.router), lambda message: told.append(decode(message.data, Story))
    )
    query = StoryQuery(request_id=request_id, router=client.router)
    client.bus.publish(story_query_subject(SchedulerId(scheduler)), encode(query))
    await until(lambda: bool(told), what="story", timeout_s=25)
    await hearing.close()
    return told[0]


async def test_a_request_that_lost_worker_and_scheduler_is_explained_and_replayed(
    deployment: Deployment, client: Client, nats_server: NatsServer, tmp_path: Path
) -> None:
    await deployment.scheduler("scheduler-1")
    await deployment.worker("worker-1", step_s=0.02)
    requests = [await client.submit(PROMPT, max_tokens=NUM_TOKENS, seed=seed) for seed in range(4)]
    await until(lambda: all(len(heard.outputs.get(0, [])) > 10 for heard in requests), what="tokens")
    await deployment.worker("worker-2", step_s=0.02)
    await until(lambda: "worker-2" in client.telemetry and client.telemetry["worker-2"].state == "ready", what="worker")
    await deployment.kill("worker-1")
    await until(lambda: all(len(heard.attempts.get(0, ())) > 1 for heard in requests), what="second attempt")
    await asyncio.sleep(1.5)  # what a crash may cost of a recording
    await deployment.scheduler("scheduler-2")
    await until(lambda: "scheduler-2" in client.telemetry, what="second scheduler")
    assert not any(heard.ended.is_set() for heard in requests)
    await deployment.kill("scheduler-1")
    await ended(*requests, timeout_s=40)
    for heard in requests:
        assert_complete(heard, NUM_TOKENS)
    await asyncio.sleep(1.5)
    told = await ask_for_story(client, "scheduler-2", requests[0].request.request_id)
    kinds = [line.kind for line in told.lines]
    assert kinds.count("placed") == 2 and {"taken", "first_token", "waits", "adopted"} <= set(kinds), kinds
    assert (
        kinds[-1] == "ended" and not told.problem and {"worker-1", "worker-2"} <= {line.worker for line in told.lines}
    )
    assert "knows nothing" in (await ask_for_story(client, "scheduler-2", RequestId("0" * 32))).problem
    assert await deployment.stop("scheduler-2") == 0

    recording = tmp_path / "recording"
    access = ("--nats-url", nats_server.url)
    code, output = await headrace("record", str(recording), *access)
    assert code == 0, output
    code, output = await headrace("replay", str(recording))
    assert code == 0 and "every decision is the same" in output, output
    assert int(output.split(" grants")[0].split()[-1]) > 10, output
    code, output = await headrace("explain", f"cmpl-{requests[0].request.request_id}", *access)
    assert code == 0, output
    for part in ("taken from the queue", "placed on worker-1", "first token", "lost its worker", "placed on worker-2"):
        assert part in output, output
    assert "scheduler-2  taken over with the worker worker-2" in output, output
    assert output.splitlines()[-1].endswith("ended: finished"), output
    code, output = await headrace("trace", f"cmpl-{requests[0].request.request_id}", "--file", str(recording))
    assert code == 0, output
    for part in ("├─ queue", "├─ scheduler-1", "choice 0 on worker-1", "prefill", "decode", "the worker was lost"):
        assert part in output, output
    for part in ("choice 0 on worker-2", "└─ scheduler-2", "went on there", "complete", "finished"):
        assert part in output, output
    assert "…" not in output.splitlines()[0], output  # it has ended


async def test_what_cannot_be_read_is_one_line(nats_server: NatsServer, tmp_path: Path) -> None:
    code, output = await headrace("record", str(tmp_path / "x"), "--nats-url", nats_server.url)
    assert code == 1 and len(output.splitlines()) == 1, output
    (tmp_path / "broken").write_bytes(b"\x00\x00\x00\x08nonsense")
    broken = str(tmp_path / "broken")
    for command in (
        ("replay", broken),
        ("explain", "0" * 32, "--file", broken),
        ("trace", "0" * 32, "--file", broken),
    ):
        code, output = await headrace(*command)
        assert code == 2 and len(output.splitlines()) == 1, output
    code, output = await headrace("replay", str(tmp_path / "absent"))
    assert code == 2 and len(output.splitlines()) == 1, output
    code, output = await headrace("replay")
    assert code == 2 and "FILE" in output, output
