"""A command is obeyed once, and only while it is fresh."""

import pytest

from headrace_shared.fleet_messages import CommandKind, WorkerCommand
from headrace_shared.messages import WorkerId
from headrace_worker.command_guard import MAX_AGE_S, MAX_REMEMBERED, CommandGuard


def command(command_id: str, sent_at: float) -> WorkerCommand:
    return WorkerCommand(
        worker=WorkerId("worker-1"), kind=CommandKind.DRAIN, command_id=command_id, sender="me", sent_at=sent_at
    )


def test_a_command_is_taken_once() -> None:
    guard = CommandGuard()
    assert guard.problem(command("a", 1000.0), 1000.5) == ""
    assert "before" in guard.problem(command("a", 1000.0), 1001.0)
    assert "before" in guard.problem(command("a", 1001.0), 1001.0), "another time makes it no other command"
    assert guard.problem(command("b", 1000.0), 1001.0) == ""


@pytest.mark.parametrize("age_s", [MAX_AGE_S + 1, -MAX_AGE_S - 1, float("nan"), float("inf"), 1e9])
def test_one_of_another_time_is_not_taken(age_s: float) -> None:
    assert "sent" in CommandGuard().problem(command("a", 2e9 - age_s), 2e9)


def test_one_without_an_id_or_a_time_is_not_taken() -> None:
    assert CommandGuard().problem(command("", 1000.0), 1000.0)
    assert CommandGuard().problem(command("a", 0.0), 1e9)


def test_what_is_forgotten_is_too_old_to_be_said_again() -> None:
    guard = CommandGuard()
    now = 1000.0
    sent: list[WorkerCommand] = []
    for number in range(2000):
        sent.append(command(str(number), now))
        assert guard.problem(sent[-1], now) == ""
        now += 1.0
        assert all(guard.problem(each, now) for each in sent[-200:])
    assert len(guard._seen) <= 2 * MAX_AGE_S + 2


def test_its_memory_is_bounded() -> None:
    guard = CommandGuard()
    taken = [guard.problem(command(str(number), 1000.0), 1000.0) == "" for number in range(MAX_REMEMBERED + 10)]
    assert sum(taken) == MAX_REMEMBERED
    assert guard.problem(command("0", 1000.0), 1000.0), "a flood does not make it forget"
