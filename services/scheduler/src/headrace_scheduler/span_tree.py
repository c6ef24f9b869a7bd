"""The life of one request as a tree of spans, from a flight recording: a trace where there is no collector.

    python -m headrace_scheduler.span_tree FILE REQUEST

As `story.py` does, it replays the recording and compares the request's choices before and after each event.
"""

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from headrace_scheduler.recording import Chunk
from headrace_scheduler.replay import Moment, chunks, nothing_of, read_file, replay
from headrace_scheduler.scheduler import Scheduler
from headrace_scheduler.sequence import SequenceState
from headrace_shared.errors import ProtocolError
from headrace_shared.messages import Admission, Request, RequestId, SequenceId, SequenceProgress
from headrace_shared.nats_ack import parse_ack_subject
from headrace_shared.tracing import trace_id_of

_LEFT = {
    "schedule": "preempted: its blocks were needed",
    "worker_lost": "the worker was lost",
    "apply_progress": "dropped by its worker",
    "add_worker": "dropped by its worker",
    "cancel": "cancelled",
    "hand_over": "handed over with its worker",
}
"""Why a choice left its worker, by the event in which it did."""


@dataclass
class Node:
    name: str
    start: float
    """Seconds since the epoch, as are all."""
    note: str = ""
    end: float | None = None
    """None: it goes on."""
    children: list["Node"] = field(default_factory=list)

    def open(self, name: str, start: float, note: str = "") -> "Node":
        child = Node(name, start, note)
        self.children.append(child)
        return child

    def close(self, end: float, note: str = "") -> None:
        """Whatever is open below ends too. Closed already: no-op."""
        if self.end is not None:
            return
        self.end = end
        self.note = ", ".join(part for part in (self.note, note) if part)
        for child in self.children:
            child.close(end)


_LET_GO = frozenset({"let_go", "hand_over", "forget"})
"""Events after which a request that has not ended is somebody else's."""


class _View(NamedTuple):
    state: SequenceState
    num_output: int
    sequence_id: SequenceId | None = None
    """Of the latest stay."""


class _Choice:
    """What is open of one choice."""

    def __init__(self) -> None:
        self.wait: Node | None = None
        self.stay: Node | None = None
        self.phase: Node | None = None
        self.num_before = 0
        """Tokens at the beginning of the stay."""


class _Builder:
    """One scheduler's part of the tree."""

    def __init__(self, request_id: RequestId) -> None:
        self._id = request_id
        self._before: dict[int, _View] = {}
        self._node: Node | None = None
        self._choices: dict[int, _Choice] = {}
        self.nodes: list[Node] = []
        self.request: Request | None = None

    def before(self, core: Scheduler, _: str, __: tuple[Any, ...]) -> None:
        self._before = self._view(core)

    def after(self, moment: Moment) -> None:
        before, after = self._before, self._view(moment.core)
        if not before and after:
            self._arrive(moment)
        for choice, now in after.items():
            then = before.get(choice, _View(SequenceState.UNKNOWN, 0))
            self._follow(choice, then, now, moment)
        if before and not after:  # over: the pass that says so follows
            for choice, then in before.items():
                num_output = then.num_output + _num_new(then, moment)
                self._follow(choice, then, _View(SequenceState.ENDED, num_output), moment)
        ended = self._ending(moment)
        if ended is None and before and not after and moment.name in _LET_GO:
            ended = f"left ({moment.name.replace('_', ' ')})"
        if self._node is not None and ended is not None:
            self._node.close(moment.wall, ended)
            self._node = None
            self._choices = {}

    def _arrive(self, moment: Moment) -> None:
        owned = moment.core.request(self._id)
        assert owned is not None
        self.request = owned.request
        note = "taken over with a worker"
        if moment.name == "add_request":
            note = f"message {moment.arguments[2]}, delivery {moment.arguments[3]}"
            self._queue(owned.ack_subject, moment.wall, note)
        self._node = Node(moment.scheduler, moment.wall, note)
        self.nodes.append(self._node)

    def _queue(self, ack_subject: str, wall: float, note: str) -> None:
        try:
            stored_at = parse_ack_subject(ack_subject).published_at
        except ValueError:
            return
        queue = Node("queue", min(stored_at, wall), note)
        queue.close(wall)
        self.nodes.append(queue)

    def _follow(self, number: int, then: _View, now: _View, moment: Moment) -> None:
        if self._node is None:
            return
        choice = self._choices.setdefault(number, _Choice())
        name = f"choice {number}"
        if choice.phase is not None and choice.phase.name == "prefill" and now.num_output > choice.num_before:
            choice.phase.close(moment.wall)
            choice.phase = choice.stay.open("decode", moment.wall) if choice.stay is not None else None
        if choice.stay is not None and now.state is not SequenceState.RUNNING:
            num_tokens = now.num_output - choice.num_before
            why = "complete" if moment.name == "apply_progress" and now.state is SequenceState.ENDED else None
            choice.stay.close(moment.wall, f"{num_tokens} tokens, {why or _LEFT.get(moment.name, moment.name)}")
            choice.stay = choice.phase = None
        if now.state in (SequenceState.WAITING, SequenceState.PARKED):
            if choice.wait is None:
                choice.wait = self._node.open(f"{name} wait", moment.wall)
        elif choice.wait is not None:
            choice.wait.close(moment.wall)
            choice.wait = None
        if now.state is SequenceState.RUNNING and choice.stay is None:
            worker, note = self._placement(number, moment)
            choice.stay = self._node.open(f"{name} on {worker}", moment.wall, note)
            choice.phase = choice.stay.open("prefill" if moment.decisions is not None else "decode", moment.wall)
            choice.num_before = now.num_output

    def _placement(self, number: int, moment: Moment) -> tuple[str, str]:
        if moment.decisions is not None:
            for worker_id, credit in moment.decisions.credits.items():
                for admission in credit.admissions:
                    if admission.request.request_id == self._id and admission.choice == number:
                        return worker_id, _described(admission)
        return str(moment.arguments[0]), "went on there"

    def _ending(self, moment: Moment) -> str | None:
        for ended in moment.decisions.ended if moment.decisions is not None else ():
            if ended.event.request_id == self._id:
                return ended.event.outcome.value + (f" ({ended.event.code})" if ended.event.code else "")
        return None

    def _view(self, core: Scheduler) -> dict[int, _View]:
        owned = core.request(self._id)
        if owned is None:
            return {}
        return {
            sequence.choice: _View(
                sequence.state, len(sequence.output), sequence.stay.sequence_id if sequence.stay is not None else None
            )
            for sequence in owned.sequences
        }


def _num_new(then: _View, moment: Moment) -> int:
    """Tokens that the event brings to a choice."""
    if moment.name != "apply_progress":
        return 0
    rows: tuple[SequenceProgress, ...] = moment.arguments[1].sequences
    return sum(len(row.tokens) for row in rows if row.sequence_id == then.sequence_id)


def span_tree(recorded: Iterable[Chunk], request_id: RequestId) -> Node | None:
    """None if the recording knows nothing of it. Raises ProtocolError."""
    by_scheduler: dict[str, list[Chunk]] = {}
    for chunk in recorded:
        by_scheduler.setdefault(chunk.scheduler, []).append(chunk)
    builders = []
    for own in by_scheduler.values():
        builder = _Builder(request_id)
        builders.append(builder)
        for moment in replay(own, builder.before):
            builder.after(moment)
    nodes = sorted((node for builder in builders for node in builder.nodes), key=lambda node: node.start)
    for node, later in pairwise(nodes):
        node.close(later.start, "went on elsewhere")
    request = next((builder.request for builder in builders if builder.request is not None), None)
    if not nodes or request is None:
        return None
    root = Node(f"request {request_id}", nodes[0].start, _about(request), children=nodes)
    if all(node.end is not None for node in nodes):
        root.end = max(node.end for node in nodes if node.end is not None)
    return root


def show(root: Node) -> str:
    """A line for each span: its place in the tree, when it began, how long it took, in seconds, and what is known."""
    lines = list(_lines(root, "", ""))
    width = max(len(label) for label, _ in lines)
    return "".join(f"{label:{width}}  {_timed(node, root.start)}  {node.note}".rstrip() + "\n" for label, node in lines)


def _lines(node: Node, lead: str, follow: str) -> Iterator[tuple[str, Node]]:
    yield lead + node.name, node
    for child in node.children:
        is_last = child is node.children[-1]
        yield from _lines(child, follow + ("└─ " if is_last else "├─ "), follow + ("   " if is_last else "│  "))


def _timed(node: Node, origin: float) -> str:
    took = "     …   " if node.end is None else f"{node.end - node.start:7.3f} s"
    return f"{node.start - origin:+9.3f}  {took}"


def _about(request: Request) -> str:
    text = f"{request.model}, {len(request.prompt) // 4} prompt tokens, up to {request.stop.max_tokens} new ones"
    trace_id = trace_id_of(request)
    return text + (f", trace {trace_id}" if trace_id else "")


def _described(admission: Admission) -> str:
    num_known = (len(admission.request.prompt) + len(admission.output)) // 4
    return f"attempt {admission.attempt}, {admission.num_cached} of {num_known} tokens cached"


def main(argv: list[str]) -> int:
    if len(argv) != 2:
        sys.stderr.write("usage: python -m headrace_scheduler.span_tree FILE REQUEST\n")
        return 2
    try:
        recorded = list(chunks(read_file(Path(argv[0]))))
        root = span_tree(recorded, RequestId(argv[1]))
    except (ProtocolError, OSError) as error:
        sys.stderr.write(f"headrace trace: {error}\n")
        return 2
    if root is None:
        sys.stderr.write(f"headrace trace: {nothing_of(argv[1], recorded)}\n")
        return 1
    sys.stdout.write(show(root))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
