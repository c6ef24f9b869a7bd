"""Files and batches through the openai client, on a running system."""

import json
import time
from collections.abc import Iterator

import httpx
import openai
import pytest
from openai.types import Batch

from tests.e2e.api import CHAT, MODEL, TEXT
from tests.e2e.launcher import Launched

pytestmark = [pytest.mark.e2e, pytest.mark.nats]

PATIENCE_S = 180.0


@pytest.fixture
def client(scripted: Launched) -> Iterator[openai.OpenAI]:
    """Without the environment's proxies."""
    http = openai.DefaultHttpxClient(trust_env=False)
    with openai.OpenAI(base_url=f"{scripted.url}/v1", api_key="batch-tests", max_retries=2, http_client=http) as client:
        yield client


@pytest.fixture
def other(scripted: Launched) -> Iterator[openai.OpenAI]:
    """The same caller, at the second router."""
    http = openai.DefaultHttpxClient(trust_env=False)
    url = f"http://127.0.0.1:{scripted.port + 1}/v1"
    with openai.OpenAI(base_url=url, api_key="batch-tests", max_retries=2, http_client=http) as client:
        yield client


def line(number: int, text: str, url: str = CHAT, **fields: object) -> dict[str, object]:
    script = json.dumps({"text": text} if text else {"echo": "ab"})
    asked = {"messages": [{"role": "user", "content": script}]} if url == CHAT else {"prompt": script}
    body = {"model": MODEL, "max_tokens": 64, **asked, **fields}
    return {"custom_id": f"request-{number}", "method": "POST", "url": url, "body": body}


def uploaded(client: openai.OpenAI, lines: list[dict[str, object]]) -> str:
    content = "\n".join(json.dumps(told) for told in lines).encode()
    return client.files.create(file=("input.jsonl", content), purpose="batch").id


def until(client: openai.OpenAI, batch: Batch, *statuses: str) -> Batch:
    deadline = time.monotonic() + PATIENCE_S
    while (now := client.batches.retrieve(batch.id)).status not in statuses:
        assert time.monotonic() < deadline and now.status in ("validating", "in_progress", "finalizing", "cancelling")
        time.sleep(0.1)
    return now


def test_from_a_file_to_answers(client: openai.OpenAI, other: openai.OpenAI) -> None:
    lines = [line(number, f"answer {number}") for number in range(20)] + [line(20, "x", temperature=7)]
    file = client.files.retrieve(uploaded(client, lines))
    assert (file.purpose, file.status, file.filename) == ("batch", "processed", "input.jsonl")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", metadata={"job": "1"}
    )
    done = until(other, batch, "completed")
    assert done.request_counts is not None and done.metadata == {"job": "1"}
    assert (done.request_counts.total, done.request_counts.completed, done.request_counts.failed) == (21, 20, 1)
    assert done.output_file_id is not None and done.error_file_id is not None
    told = [json.loads(text) for text in other.files.content(done.output_file_id).text.splitlines()]
    answers = {one["custom_id"]: one["response"]["body"]["choices"][0]["message"]["content"] for one in told}
    assert answers == {f"request-{number}": f"answer {number}" for number in range(20)} and len(told) == 20
    failed = [json.loads(text) for text in client.files.content(done.error_file_id).iter_lines() if text]
    assert [(one["custom_id"], one["response"]["status_code"]) for one in failed] == [("request-20", 400)]
    assert batch.id in [listed.id for listed in client.batches.list(limit=5)]
    ids = {file.id, done.output_file_id, done.error_file_id}
    assert ids <= {listed.id for listed in client.files.list(limit=1)}
    assert client.files.list(purpose="batch_output", order="asc").data[0].purpose == "batch_output"
    for file_id in ids:
        assert other.files.delete(file_id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file.id)


def test_a_bad_input_is_explained(client: openai.OpenAI) -> None:
    file_id = uploaded(client, [line(1, "x"), line(1, "y", TEXT)])
    batch = client.batches.create(input_file_id=file_id, endpoint="/v1/chat/completions", completion_window="24h")
    failed = until(client, batch, "failed")
    assert failed.errors is not None and failed.errors.data is not None
    assert [(error.line, error.code) for error in failed.errors.data] == [(2, "mismatched_url")]
    with pytest.raises(openai.NotFoundError):
        client.batches.create(input_file_id="file-0", endpoint="/v1/completions", completion_window="24h")
    with pytest.raises(openai.BadRequestError):
        client.files.create(file=("a", b"x"), purpose="assistants")


def test_cancelling_while_others_are_answered(client: openai.OpenAI, other: openai.OpenAI) -> None:
    """A batch that would take minutes fills the worker; whoever waits for an answer gets it meanwhile."""
    endless = [line(number, "", TEXT, max_tokens=3500) for number in range(40)]
    batch = client.batches.create(
        input_file_id=uploaded(client, endless), endpoint="/v1/completions", completion_window="24h"
    )
    until(client, batch, "in_progress")
    for number in range(5):
        reply = other.completions.create(model=MODEL, prompt=json.dumps({"text": f"now {number}"}), max_tokens=16)
        assert reply.choices[0].text == f"now {number}"
    assert client.batches.retrieve(batch.id).status == "in_progress"
    assert other.batches.cancel(batch.id).status in ("cancelling", "cancelled")
    done = until(client, batch, "cancelled")
    assert done.request_counts is not None and done.request_counts.total == 40
    assert done.request_counts.completed + done.request_counts.failed == 40 and done.request_counts.failed > 0
    with httpx.Client(base_url=str(client.base_url).removesuffix("/v1/"), trust_env=False) as http:
        deadline = time.monotonic() + PATIENCE_S
        while http.get("/load", headers={"authorization": "Bearer batch-tests"}).json()["server_load"]:
            assert time.monotonic() < deadline
            time.sleep(0.1)
