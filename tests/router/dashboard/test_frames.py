"""The live page's figures, from what services say on the bus."""

import json

import pytest

from headrace_router.choices import Usage
from headrace_router.dashboard.board import SILENT_AFTER_S, Board
from headrace_router.dashboard.frame import MAX_WORKERS, Depth, make_frame
from headrace_router.dashboard.history import MAX_FRAMES_AT_ONCE, History
from headrace_router.dashboard.journal import MAX_CALLS, RECENT_S, Journal
from headrace_shared.fleet_messages import Hello, Telemetry, WorkerState
from headrace_shared.messages import RequestId, WorkerId


def hello(worker: str, state: WorkerState = WorkerState.READY) -> Hello:
    return Hello(
        worker=WorkerId(worker),
        model="m",
        state=state,
        epoch=1,
        num_blocks=100,
        block_size=16,
        context=512,
        max_sequences=8,
        tokens_per_iteration=256,
    )


def telemetry(service: str, service_id: str, **gauges: float) -> Telemetry:
    named = {name.replace("__", ":"): value for name, value in gauges.items()}
    return Telemetry(service=service, id=service_id, state="ready", model="m", gauges=named)


def worker_figures(worker: str, running: float, free: float, tokens: float, prefilled: float = 0.0) -> Telemetry:
    return telemetry(
        "worker",
        worker,
        num_running=running,
        num_blocks=100.0,
        num_free_blocks=free,
        tokens_per_s=tokens,
        num_prefill_tokens=prefilled,
    )


def test_totals_are_sums_over_the_fleet_and_shares_of_what_there_is() -> None:
    board = Board()
    for worker, running, free in (("w1", 2, 60), ("w2", 6, 20)):
        board.on_hello(hello(worker), 10.0)
        board.on_telemetry(worker_figures(worker, running, free, 100.0), 10.0)
    board.on_hello(hello("w3", WorkerState.LOADING), 10.0)
    board.on_hello(hello("w4", WorkerState.PARKED), 10.0)
    board.on_telemetry(telemetry("scheduler", "s1", num_waiting=3.0, num_running=8.0), 10.0)
    board.on_telemetry(telemetry("router", "r1", num_in_flight=5.0), 10.0)
    board.on_telemetry(telemetry("router", "r2", num_in_flight=6.0), 10.0)
    totals = make_frame(board, {"m": Depth(4, 9)}, 1, 0.0).totals
    assert (totals.queue, totals.in_flight, totals.running) == (7, 11, 8)
    assert (totals.tokens_per_s, totals.batch, totals.kv) == (200.0, 0.5, 0.6)
    assert (totals.ready, totals.starting, totals.parked, totals.draining) == (2, 1, 1, 0)


def test_a_queue_that_did_not_answer_is_unknown_and_not_empty() -> None:
    frame = make_frame(Board(), {"a": Depth(3, 0), "b": Depth(None, None)}, 1, 0.0)
    assert frame.totals.queue is None and [queue.waiting for queue in frame.queues] == [3, None]


def test_latencies_of_several_routers_are_weighed_by_their_answers() -> None:
    board = Board()
    for router, count, p50, p99 in (("r1", 30.0, 0.1, 0.4), ("r2", 10.0, 0.5, 0.9), ("r3", 0.0, 9.0, 9.0)):
        board.on_telemetry(telemetry("router", router, num_first_tokens=count, ttft_p50_s=p50, ttft_p99_s=p99), 1.0)
    totals = make_frame(board, {}, 1, 0.0).totals
    assert totals.ttft_p50_ms == pytest.approx(200.0) and totals.ttft_p99_ms == pytest.approx(900.0)
    assert make_frame(Board(), {}, 1, 0.0).totals.ttft_p50_ms is None


def test_prefill_is_a_rate_between_two_words_of_a_worker() -> None:
    board = Board()
    board.on_hello(hello("w"), 10.0)
    board.on_telemetry(worker_figures("w", 1, 50, 0.0, prefilled=1000.0), 10.0)
    board.on_telemetry(worker_figures("w", 1, 50, 0.0, prefilled=1600.0), 12.0)
    assert make_frame(board, {}, 1, 0.0).workers[0].prefill_per_s == 300.0


def test_the_silent_and_those_who_leave_are_gone() -> None:
    board = Board()
    board.on_hello(hello("w1"), 10.0)
    board.on_hello(hello("w2"), 10.0)
    board.on_hello(hello("w3"), 10.0)
    board.on_hello(hello("w3", WorkerState.LEAVING), 10.5)
    board.on_telemetry(telemetry("router", "r"), 10.0)
    board.on_hello(hello("w2"), 10.0 + SILENT_AFTER_S)
    board.expire(10.1 + SILENT_AFTER_S)
    frame = make_frame(board, {}, 1, 0.0)
    assert [worker.id for worker in frame.workers] == ["w2"] and frame.routers == []


def test_the_leading_autoscaler_says_what_is_wanted() -> None:
    board = Board()
    board.on_telemetry(telemetry("autoscaler", "a1", is_leader=0.0, desired_workers__m=9.0), 1.0)
    board.on_telemetry(
        telemetry("autoscaler", "a2", is_leader=1.0, desired_workers__m=3.0, max_workers__m=5.0, coming_workers__m=1.0),
        1.0,
    )
    frame = make_frame(board, {}, 1, 0.0)
    assert frame.totals.desired == 3
    (model,) = frame.autoscalers[1].models
    assert (model.model, model.desired, model.most, model.coming) == ("m", 3, 5, 1)


def test_a_large_fleet_makes_no_large_frame() -> None:
    board, history = Board(), History()
    for number in range(500):
        worker = f"worker-{number:04}"
        board.on_hello(hello(worker), 1.0)
        board.on_telemetry(worker_figures(worker, 8, 0, 1000.0), 1.0)
    frame = make_frame(board, {}, 1, 0.0)
    assert len(frame.workers) == MAX_WORKERS and frame.num_workers == 500
    assert frame.totals.running == 4000 and frame.totals.kv == 1.0
    assert len(history.add(frame)) < 20_000


def test_history_keeps_a_bounded_past_and_gives_it_out_in_pieces() -> None:
    history = History(num_frames=300)
    for seq in range(1, 501):
        history.add(make_frame(Board(), {}, seq, float(seq)))
    columns = json.loads(history.columns())
    assert columns["seq"] == list(range(201, 501)) and {len(column) for column in columns.values()} == {300}
    assert [frame["seq"] for frame in json.loads(history.frames(190, 210))] == list(range(201, 211))
    assert len(json.loads(history.frames(0, 10**9))) == 0, "counted from the first asked for, not from the first held"
    assert len(json.loads(history.frames(201, 10**9))) == MAX_FRAMES_AT_ONCE
    assert history.latest_seq == 500 and json.loads(history.latest or b"")["seq"] == 500


def test_a_journal_shows_each_owner_its_own_and_forgets_the_oldest() -> None:
    journal = Journal()
    for number in range(MAX_CALLS + 10):
        journal.begin(RequestId(f"{number:032x}"), "a" if number % 2 else "b", "m", float(number))
    newest = journal.recent("a", 5)
    assert [note.arrived_at for note in newest] == [MAX_CALLS + 9 - 2 * i for i in range(5)]
    journal.recent("a", 5)[4].end(1e6, "finished", Usage(1, 1, 0))
    assert len(journal.recent("a", 5)) == 6, "what has ended and what goes on do not crowd each other out"
    assert {note.owner for note in journal.recent("b", 1000)} == {"b"} and journal.recent("c", 5) == []
    assert journal.get(RequestId(f"{0:032x}"), "b") is None
    assert journal.get(RequestId(f"{MAX_CALLS:032x}"), "a") is None, "somebody else's"


def test_a_journals_gauges_are_about_the_last_seconds_only() -> None:
    journal = Journal()
    for number in range(100):
        note = journal.begin(RequestId(f"{number:032x}"), "a", "m", 100.0)
        journal.first_token(note, 100.0 + number / 100)
        note.end(102.0, "finished", Usage(3, 4, 1))
    gauges = journal.gauges(101.0)
    assert gauges["ttft_p50_s"] == pytest.approx(0.49) and gauges["ttft_p99_s"] == pytest.approx(0.98)
    assert gauges["num_first_tokens"] == 100.0 and gauges["requests_per_s"] == 100 / RECENT_S
    later = journal.gauges(101.0 + 2 * RECENT_S)
    assert later == {"requests_per_s": 0.0, "num_first_tokens": 0.0}
