"""The tree of a request's spans, read off a recording of the core alone."""

import re

import msgspec
from msgspec.structs import replace

from headrace_scheduler.decisions import LossCause, WorkerFacts
from headrace_scheduler.recording import Chunk, Recorder
from headrace_scheduler.scheduler import Scheduler
from headrace_scheduler.span_tree import Node, show, span_tree
from headrace_shared.messages import (
    Admission,
    FinishReason,
    Progress,
    RequestId,
    SequenceProgress,
    SequenceSnapshot,
    WorkerId,
)
from headrace_shared.trace_context import TraceContext
from tests.shared.samples import REQUEST

FACTS = WorkerFacts(num_blocks=64, block_size=16, context=1024, max_sequences=8, tokens_per_iteration=512)
TRACE = TraceContext("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331")
WORKED = replace(
    REQUEST,
    num_choices=1,
    adapter="",
    adapter_digest="",
    embeds=False,
    trace=TRACE.to_headers(),
    prompt=b"\1\0\0\0" * 40,
)
ACK = "$JS.ACK.REQUESTS.m-interactive.1.7.7.995000000000.0"
"""Stored at 995 s."""
WALL, START = 1000.0, 50.0


class Recorded:
    """One scheduler's core under a recorder; times are seconds since the start."""

    def __init__(self, name: str) -> None:
        self.core = Scheduler()
        self.recorder = Recorder(name)
        self.recorder.attach(self.core, WALL, START)

    def chunk(self) -> Chunk:
        data = self.recorder.take(WALL, START)
        assert data is not None
        return msgspec.msgpack.decode(data, type=Chunk)

    def place(self, at: float) -> Admission:
        (credit,) = self.core.schedule(START + at).credits.values()
        return credit.admissions[0]

    def progress(self, at: float, worker: str, admission: Admission, *tokens: int, is_last: bool = False) -> None:
        finish = FinishReason.LENGTH if is_last else None
        row = SequenceProgress(admission.sequence_id, 40 + len(tokens), tokens, finish)
        message = Progress(worker=WorkerId(worker), epoch=1, number=1, grant_seen=1, sequences=(row,))
        self.core.apply_progress(WorkerId(worker), message, START + at)


def flat(node: Node, depth: int = 0) -> list[tuple[int, str]]:
    return [(depth, node.name), *(line for child in node.children for line in flat(child, depth + 1))]


def moved() -> tuple[Recorded, Admission]:
    """From a worker that is lost to another; with the second admission."""
    one = Recorded("scheduler-1")
    one.core.add_worker(WorkerId("worker-1"), FACTS, (), START)
    one.core.add_request(WORKED, ACK, 7, 1, START + 1.0)
    first = one.place(1.1)
    one.progress(1.5, "worker-1", first, 5)
    one.progress(1.6, "worker-1", first, 6)
    one.core.worker_lost(WorkerId("worker-1"), START + 2.0, LossCause.VANISHED, "it is silent")
    one.core.add_worker(WorkerId("worker-2"), FACTS, (), START + 2.0)
    return one, one.place(2.5)


def test_a_request_that_moved_is_one_tree() -> None:
    one, second = moved()
    one.progress(3.0, "worker-2", second, 7, 8, is_last=True)
    one.core.schedule(START + 3.1)
    root = span_tree([one.chunk()], WORKED.request_id)
    assert root is not None
    assert flat(root) == [
        (0, f"request {WORKED.request_id}"),
        (1, "queue"),
        (1, "scheduler-1"),
        (2, "choice 0 wait"),
        (2, "choice 0 on worker-1"),
        (3, "prefill"),
        (3, "decode"),
        (2, "choice 0 wait"),
        (2, "choice 0 on worker-2"),
        (3, "prefill"),
        (3, "decode"),
    ]
    text = show(root)
    assert re.search(r"queue +\+0\.000 +6\.000 s +message 7, delivery 1", text), text
    assert re.search(r"on worker-1 +\+6\.100 +0\.900 s .*2 tokens, the worker was lost", text), text
    assert re.search(r"on worker-2 +\+7\.500 +0\.500 s .*complete", text), text
    assert TRACE.trace_id in text.splitlines()[0] and "…" not in text and "finished" in text


def test_a_scheduler_that_was_killed_ends_where_the_next_one_begins() -> None:
    one, second = moved()
    entry = SequenceSnapshot(admission=second, tokens=b"", num_computed=40)
    two = Recorded("scheduler-2")
    two.core.add_worker(WorkerId("worker-2"), FACTS, [entry], START + 4.0)
    two.progress(5.0, "worker-2", second, 7, is_last=True)
    two.core.schedule(START + 5.1)
    root = span_tree([one.chunk(), two.chunk()], WORKED.request_id)
    assert root is not None and root.end is not None
    text = show(root)
    assert re.search(r"├─ scheduler-1 .*went on elsewhere", text), text
    assert re.search(r"└─ scheduler-2 .*taken over with a worker, finished", text), text
    assert re.search(r"choice 0 on worker-2 .*went on there, 1 tokens, complete", text), text


def test_an_unknown_request_has_none() -> None:
    one, _ = moved()
    assert span_tree([one.chunk()], RequestId("0" * 32)) is None
