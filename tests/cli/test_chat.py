"""`headrace chat` against an HTTP server with written answers."""

import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from headrace_cli import chat_command
from headrace_cli.commands import run
from tests.http_double import SilentHandler, served, url_of


class Server:
    """Answers chat requests with `events`; keeps what it was asked."""

    def __init__(self) -> None:
        self.url = ""
        self.models: list[str] = ["tiny"]
        self.status = 200
        self.events: list[str] = []
        self.asked: list[dict[str, Any]] = []
        self.authorization: str | None = None
        server = self

        class Handler(SilentHandler):
            def do_GET(self) -> None:
                self._send(200, json.dumps({"object": "list", "data": [{"id": name} for name in server.models]}))

            def do_POST(self) -> None:
                server.authorization = self.headers["Authorization"]
                server.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                if server.status == 200:
                    self._send(200, "".join(f"data: {event}\n\n" for event in server.events))
                else:
                    self._send(server.status, json.dumps({"error": {"message": "The model 'x' does not exist."}}))

            def _send(self, status: int, body: str) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body.encode())))
                self.end_headers()
                self.wfile.write(body.encode())

        self.handler = Handler


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    with served(server.handler) as listening:
        server.url = url_of(listening)
        yield server


def delta(text: str) -> str:
    return json.dumps({"choices": [{"index": 0, "delta": {"content": text}}]})


USAGE = json.dumps({"choices": [], "usage": {"completion_tokens": 2}})


def test_quick_streams_one_answer(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    role = json.dumps({"choices": [{"index": 0, "delta": {"role": "assistant"}}]})
    server.events = [role, delta("Pa"), delta("ris ✓"), USAGE, "[DONE]"]
    assert run(["chat", "--url", server.url, "--quick", "Capital?", "--system", "Be brief.", "--temperature", "0"]) == 0
    assert capsys.readouterr().out == "Paris ✓\n"
    assert server.asked[0]["model"] == "tiny" and server.asked[0]["temperature"] == 0
    assert server.asked[0]["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Capital?"},
    ]


def test_the_key_is_sent(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_API_KEY", "sk-1")
    server.events = [delta("x"), "[DONE]"]
    assert run(["chat", "--url", server.url, "--quick", "hi", "--model", "other"]) == 0
    assert server.authorization == "Bearer sk-1" and server.asked[0]["model"] == "other"


def test_a_conversation_remembers(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = iter(["hello", "", "again"])

    def read(_: str) -> str:
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", read)
    server.events = [delta("Hi."), "[DONE]"]
    assert run(["chat", "--url", server.url]) == 0
    roles = [message["role"] for message in server.asked[1]["messages"]]
    assert roles == ["user", "assistant", "user"]
    assert server.asked[1]["messages"][1]["content"] == "Hi."
    assert capsys.readouterr().out.count("Hi.\n") == 2


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([delta("Par")], "the answer broke off"),
        (["{nonsense"], "the server sent no JSON: {nonsense"),
        ([delta("Par"), json.dumps({"error": {"message": "The worker was lost."}})], "The worker was lost."),
    ],
)
def test_a_broken_answer_is_told(
    server: Server, events: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    server.events = events
    assert run(["chat", "--url", server.url, "--quick", "hi"]) == 1
    assert capsys.readouterr().err == f"headrace chat: {message}\n"


def test_a_refusal_is_told(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    server.status = 404
    assert run(["chat", "--url", server.url, "--quick", "hi", "--model", "x"]) == 1
    assert capsys.readouterr().err == "headrace chat: The model 'x' does not exist.\n"


def test_a_wanted_key_is_told_with_where_to_put_it(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    server.status = 401
    assert run(["chat", "--url", server.url, "--quick", "hi", "--model", "x"]) == 1
    assert "; set HEADRACE_API_KEY or --api-key-file\n" in capsys.readouterr().err


@pytest.mark.parametrize("given", ["{}/v1", "{}/v1/", "{}/"])
@pytest.mark.parametrize("scheme", ["http://", ""])
def test_addresses_as_other_clients_want_them(server: Server, given: str, scheme: str) -> None:
    server.events = [delta("Paris"), "[DONE]"]
    url = given.format(scheme + server.url.removeprefix("http://"))
    assert run(["chat", "--url", url, "--quick", "hi"]) == 0
    assert len(server.asked) == 1


def test_a_server_that_says_nothing_is_not_waited_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that is frozen: the kernel takes connections for it."""
    monkeypatch.setattr(chat_command, "QUESTION_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        assert run(["chat", "--url", url]) == 1
    assert capsys.readouterr().err.startswith(f"headrace chat: {url} does not answer: timed out; ")


def test_no_model_yet(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    server.models = []
    assert run(["chat", "--url", server.url, "--quick", "hi"]) == 1
    assert "the server has no model yet" in capsys.readouterr().err


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "http://[bad", "ftp://127.0.0.1"])
def test_an_unreachable_server_is_told_in_one_line(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["chat", "--url", url, "--quick", "hi"]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("headrace chat: ") and captured.err.count("\n") == 1 and url in captured.err


@pytest.mark.parametrize("proxy", ["http://127.0.0.1:9", "socks5://127.0.0.1:9", "nonsense://127.0.0.1:9"])
def test_no_proxy_is_asked_for_this_machine(
    server: Server, proxy: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("ALL_PROXY", "HTTP_PROXY", "all_proxy", "http_proxy"):
        monkeypatch.setenv(name, proxy)
    server.events = [delta("Paris"), "[DONE]"]
    assert run(["chat", "--url", server.url, "--quick", "hi"]) == 0
    assert capsys.readouterr().out == "Paris\n"
    assert run(["chat", "--url", "http://router.example", "--quick", "hi"]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("headrace chat: ") and captured.err.count("\n") == 1
