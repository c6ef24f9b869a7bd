"""An input is called slow for its own work only, and for all of it."""

import asyncio
import threading
import time
from collections.abc import Callable

import pytest

from tests.fuzz import fuzzing
from tests.fuzz.fuzzing import NUM_ALONE, Findings, Target, run
from tests.fuzz.http import HttpFuzzer, read_raw
from tests.fuzz.mutation import mutate_bytes

SLOW_S = 0.1


def burn(seconds: float) -> None:
    """Processor time, of the thread that calls it."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def in_a_thread(seconds: float) -> threading.Thread:
    thread = threading.Thread(target=burn, args=(seconds,))
    thread.start()
    return thread


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int], None]], Findings]:
    """What comes of a target that is told how often it has run."""
    monkeypatch.setattr(fuzzing, "SLOW_S", SLOW_S)

    def find(work: Callable[[int], None]) -> Findings:
        calls: list[bytes] = []

        def called(data: bytes) -> None:
            work(len(calls))
            calls.append(data)

        findings = Findings()
        run(Target("t", [b""], mutate_bytes, called, ()), b"input", findings)
        assert len(calls) == 1 + NUM_ALONE * findings.num_doubted["t"]
        return findings

    return find


def test_what_is_slow_every_time_is_found(found: Callable[[Callable[[int], None]], Findings]) -> None:
    findings = found(lambda _: burn(2 * SLOW_S))
    assert findings.failures[0].what.startswith("took ") and findings.failures[0].data == b"input"


def test_work_that_a_call_waits_for_is_its_own(found: Callable[[Callable[[int], None]], Findings]) -> None:
    assert found(lambda _: in_a_thread(2 * SLOW_S).join()).failures


def test_what_is_slow_once_is_no_failure(found: Callable[[Callable[[int], None]], Findings]) -> None:
    """A library was loaded, perhaps."""
    findings = found(lambda number: burn(2 * SLOW_S) if number == 0 else None)
    assert findings.num_doubted["t"] == 1 and not findings.failures and findings.slowest_s["t"] < SLOW_S


def test_what_others_do_meanwhile_is_nobody_s_failure(found: Callable[[Callable[[int], None]], Findings]) -> None:
    """What an earlier call has begun goes on, even for longer than the first look at it."""
    others: list[threading.Thread] = []

    def work(number: int) -> None:
        if number == 0:
            others.append(in_a_thread(6 * SLOW_S))
            until = time.process_time() + 2 * SLOW_S
            while time.process_time() < until:
                time.sleep(0.001)

    findings = found(work)
    others[0].join()
    assert findings.num_doubted["t"] == 1 and not findings.failures and findings.slowest_s["t"] < SLOW_S


async def test_what_nobody_handles_in_the_event_loop_is_found() -> None:
    findings = Findings()
    fuzzer = HttpFuzzer.__new__(HttpFuzzer)
    fuzzer._findings, fuzzer._last = findings, b"input"
    with fuzzer._listening():
        asyncio.get_running_loop().call_soon(lambda: 1 // 0)
        await asyncio.sleep(0.01)
    assert "ZeroDivisionError" in findings.failures[0].what and findings.failures[0].data == b"input"


def test_answers_are_read_as_http() -> None:
    assert read_raw(b"") == (0, "")
    assert read_raw(b"HTTP/1.1 204 No Content\r\n\r\n") == (204, "")
    assert read_raw(b"HTTP/1.1 200 OK\r\n\r\nHTTP/1.1 500 Oh\r\n\r\n").problem == "status 500"
    assert read_raw(b"<html>").problem and read_raw(b"HTTP/1.0 200 OK\r\n").problem
