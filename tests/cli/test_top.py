"""`headrace top` against a server with written events."""

import json
from collections.abc import Iterator

import pytest

from headrace_cli.commands import run
from tests.http_double import SilentHandler, served, url_of

FRAME = {
    "seq": 3,
    "at": 1_700_000_000.0,
    "totals": {
        "queue": 7,
        "in_flight": 9,
        "tokens_per_s": 120.4,
        "ttft_p50_ms": 85.2,
        "batch": 0.5,
        "kv": 0.25,
        "ready": 2,
    },
    "routers": [{"id": "router-1", "state": "ready", "in_flight": 9, "requests_per_s": 4.5}],
    "queues": [{"model": "tiny", "waiting": 5, "taken": 4}],
    "schedulers": [{"id": "scheduler-1", "state": "ready", "waiting": 2, "running": 8, "oldest_wait_s": 1.25}],
    "workers": [
        {"id": f"worker-{n}", "state": "ready", "running": 4, "max_sequences": 8, "blocks": 400, "blocks_held": 100}
        for n in (1, 2)
    ],
    "num_workers": 5,
    "autoscalers": [{"id": "autoscaler-1", "state": "ready", "models": [{"model": "tiny", "desired": 3, "coming": 1}]}],
    "overflows": [],
}
PAST = {"boot": "router-1", "columns": {"queue": [0, None, 3], "tokens_per_s": [1.0, 2.0, 3.0]}}


class Server:
    def __init__(self) -> None:
        self.url = ""
        self.status = 200
        self.text = f"event: past\ndata: {json.dumps(PAST)}\n\nevent: frame\ndata: {json.dumps(FRAME)}\n\n"
        self.authorization: str | None = None
        server = self

        class Handler(SilentHandler):
            def do_GET(self) -> None:
                server.authorization = self.headers["Authorization"]
                self.send_response(server.status if self.path == "/dashboard/api/live" else 404)
                self.end_headers()
                self.wfile.write(server.text.encode())

        self.handler = Handler


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    with served(server.handler) as listening:
        server.url = url_of(listening)
        yield server


def test_the_fleet_is_printed_once_where_nobody_watches(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["top", "--url", server.url]) == 0
    out = capsys.readouterr().out
    for text in ("7", "85 ms p50", "9 open, 4.5 requests/s", "5 waiting, 4 taken", "oldest waits 1.2 s", "100/400"):
        assert text in out, text
    assert "tiny: wants 3, 1 coming" in out and "and 3 more" in out and "█████░" in out


def test_json_is_the_frame_as_it_came(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["top", "--url", server.url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == FRAME


def test_the_key_is_sent_and_asked_for(
    server: Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_API_KEY", "k")
    assert run(["top", "--url", server.url, "--once"]) == 0 and server.authorization == "Bearer k"
    server.status = 401
    assert run(["top", "--url", server.url, "--once"]) == 1
    assert "API key" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("status", "text", "told"),
    [
        (404, "", "its dashboard on?"),
        (503, "", "HTTP 503"),
        (200, "", "broke off"),
        (200, "data: {}\n\n", "understandable"),
    ],
)
def test_what_is_wrong_is_one_line(
    server: Server, capsys: pytest.CaptureFixture[str], status: int, text: str, told: str
) -> None:
    server.status, server.text = status, text
    assert run(["top", "--url", server.url, "--once"]) == 1
    error = capsys.readouterr().err
    assert told in error and len(error.splitlines()) == 1
