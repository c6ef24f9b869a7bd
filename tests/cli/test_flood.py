"""`headrace flood` against a server whose pauses and faults are known."""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace_cli.errors import CommandError
from headrace_cli.flood.report import Report, Spread, encode_report, read_report
from headrace_cli.flood_command import run
from tests.cli.flood_server import FloodServer
from tests.http_double import SilentHandler, served, url_of


class Flooded:
    """The server, and floods of it."""

    def __init__(self, server: FloodServer, url: str, folder: Path) -> None:
        self.server = server
        self.url = url
        self._folder = folder

    async def flood(self, *arguments: str) -> Report:
        path = self._folder / "report.json"
        await asyncio.to_thread(self._run, [*arguments, "--json", str(path)])
        return read_report(str(path))

    def _run(self, arguments: list[str]) -> None:
        # In a process of its own: the command sets a signal handler, which only a main thread may.
        done = subprocess.run(
            [sys.executable, "-m", "headrace_cli", "flood", "--url", self.url, *arguments],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode in (0, 1) and "Traceback" not in done.stderr, done.stderr


@pytest.fixture
async def flooded(tmp_path: Path) -> AsyncIterator[Flooded]:
    server = FloodServer()
    url = await server.start()
    yield Flooded(server, url, tmp_path)
    await server.close()


async def test_an_open_loop_sends_at_its_rate_and_counts_every_request_once(flooded: Flooded) -> None:
    report = await flooded.flood("--rate", "40", "--arrivals", "constant", "--duration", "1.5")
    assert report.num_requests == report.num_complete == len(flooded.server.asked) == 60
    assert report.output_tokens == 180 and report.prompt_tokens == 420 and report.cached_tokens == 120
    assert report.offered_per_s == pytest.approx(40.0) and report.good_share == 1.0
    assert report.errors == {} and sum(report.seconds.due) == 60


async def test_a_closed_loop_keeps_its_number_of_conversations_open(flooded: Flooded) -> None:
    flooded.server.first_s = 0.1
    report = await flooded.flood("--concurrency", "4", "--duration", "1")
    assert flooded.server.num_connections == 4, "connections are used again"
    assert max(report.seconds.open) <= 4 and report.num_complete > 4
    assert report.ttft.p50 is not None and report.ttft.p50 >= 100.0


async def test_latency_counts_from_when_a_request_was_due_though_the_server_froze(flooded: Flooded) -> None:
    """A closed loop sees one slow request; those that it would have sent meanwhile are what an open loop must show."""
    flooded.server.freezes_for_s = 1.0
    report = await flooded.flood("--rate", "50", "--arrivals", "constant", "--duration", "2")
    slow = [ttft for ttft in report.rows.ttft_ms if ttft is not None and ttft > 200.0]
    assert len(slow) >= 30, f"of about 50 requests due while the server stood, {len(slow)} show it"
    assert report.num_complete == 100


async def test_several_tokens_in_a_piece_are_counted_as_the_server_says(flooded: Flooded) -> None:
    flooded.server.tokens_per_chunk = 4
    report = await flooded.flood("--rate", "20", "--arrivals", "constant", "--duration", "1")
    assert report.output_tokens == 20 * 12
    assert report.output_tokens_per_s == pytest.approx(240.0, rel=0.2)


async def test_gaps_between_pieces_are_the_inter_token_latency(flooded: Flooded) -> None:
    flooded.server.gap_s = 0.05
    report = await flooded.flood("--rate", "10", "--arrivals", "constant", "--duration", "1.5")
    assert report.itl.p50 is not None and report.itl.p50 >= 45.0
    assert report.tpot.p50 is not None and report.tpot.p50 >= 45.0


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ({"status": 429}, "http 429 queue_full"),
        ({"failure": {"message": "gone", "code": "worker_lost"}}, "stream worker_lost"),
        ({"breaks_after": 2}, "broke off"),
    ],
)
async def test_faults_are_counted_by_kind(flooded: Flooded, fault: dict[str, Any], error: str) -> None:
    for name, value in fault.items():
        setattr(flooded.server, name, value)
    report = await flooded.flood("--rate", "20", "--arrivals", "constant", "--duration", "0.5")
    assert report.errors == {error: 10} and report.num_complete == 0 and report.num_good == 0


async def test_answers_that_do_not_come_are_unfinished_and_no_errors(flooded: Flooded) -> None:
    flooded.server.first_s = 30.0
    report = await flooded.flood("--rate", "20", "--arrivals", "constant", "--duration", "0.5", "--drain", "0.2")
    assert report.num_unfinished == 10 and report.errors == {}


async def test_a_bound_on_open_conversations_is_told_as_an_error(flooded: Flooded) -> None:
    flooded.server.first_s = 30.0
    arguments = ("--rate", "20", "--arrivals", "constant", "--duration", "0.5", "--drain", "0", "--max-open", "4")
    report = await flooded.flood(*arguments)
    assert report.errors == {"not sent: too many open": 6} and report.num_unfinished == 4


async def test_turns_carry_what_was_said_before(flooded: Flooded) -> None:
    await flooded.flood("--rate", "4", "--arrivals", "constant", "--duration", "0.5", "--turns", "3")
    lengths = sorted(len(request["messages"]) for request in flooded.server.asked)
    assert lengths == [1, 1, 3, 3, 5, 5]
    last = max(flooded.server.asked, key=lambda request: len(request["messages"]))
    assert [message["role"] for message in last["messages"]] == ["user", "assistant", "user", "assistant", "user"]
    assert last["messages"][1]["content"] == "word word word "


async def test_prefixes_are_shared_and_the_rest_is_not(flooded: Flooded) -> None:
    await flooded.flood(
        *("--rate", "20", "--arrivals", "constant", "--duration", "0.5", "--endpoint", "completions"),
        *("--prefix-tokens", "40", "--prefixes", "2", "--prompt-tokens", "20", "--output-tokens", "5"),
    )
    prompts = [request["prompt"].split() for request in flooded.server.asked]
    # The server counts two tokens a word.
    assert {len(prompt) for prompt in prompts} == {30}
    assert len({tuple(prompt[:20]) for prompt in prompts}) == 2
    assert len({tuple(prompt[20:24]) for prompt in prompts}) == 10
    assert all(request["max_tokens"] == 5 and request["ignore_eos"] for request in flooded.server.asked)


async def test_a_trace_is_played_with_its_lengths(flooded: Flooded, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [(1000, 20, 3), (1200, 40, 5), (1400, 60, 7), (99_000, 80, 9)]
    trace.write_text(
        "".join(json.dumps({"timestamp": at, "input_length": n, "output_length": m}) + "\n" for at, n, m in rows)
    )
    report = await flooded.flood("--trace", str(trace), "--trace-speed", "2", "--duration", "1")
    assert [request["max_tokens"] for request in flooded.server.asked] == [3, 5, 7]
    assert report.rows.due_s == [0.0, 0.1, 0.2]


async def test_a_report_is_one_page_that_asks_for_nothing_else(flooded: Flooded, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    await flooded.flood("--rate", "20", "--duration", "0.5", "--html", str(path))
    text = path.read_text()
    assert text.count("<svg") == 6 and "<script" not in text
    assert text.count("http") == text.count(flooded.url), "nothing is loaded from anywhere"


def test_compare_tells_ratios_and_differing_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = Report(model="m", settings={"rate": 4.0}, output_tokens_per_s=100.0, ttft=Spread(p99=50.0))
    second = msgspec.structs.replace(first, settings={"rate": 8.0}, output_tokens_per_s=150.0, ttft=Spread(p99=100.0))
    (tmp_path / "a").write_bytes(encode_report(first))
    (tmp_path / "b").write_bytes(encode_report(second))
    assert run(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    out = capsys.readouterr().out
    assert "rate: A 4.0, B 8.0" in out
    assert any("output tokens/s" in line and "1.50  better" in line for line in out.splitlines())
    assert any("TTFT p99" in line and "2.00  worse" in line for line in out.splitlines())


async def test_a_closed_loop_does_not_ask_a_server_that_refuses_as_fast_as_it_can(flooded: Flooded) -> None:
    flooded.server.status = 503
    report = await flooded.flood("--concurrency", "2", "--duration", "1")
    assert report.num_complete == 0 and 2 <= report.num_requests <= 22


def test_a_server_that_wants_a_key_says_where_to_put_it() -> None:
    class Closed(SilentHandler):
        def do_GET(self) -> None:
            self.send_response(401)
            self.send_header("Content-Length", "0")
            self.end_headers()

    with served(Closed) as listening, pytest.raises(CommandError, match="wants an API key; set HEADRACE_API_KEY or "):
        run(["--url", f"{url_of(listening)}/v1", "--rate", "1", "--duration", "1"])
