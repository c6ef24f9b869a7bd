"""Tells what became of one request, from a flight recording.

    python -m headrace_scheduler.story [--json] FILE REQUEST

The recording is replayed, and the request's sequences are compared before and after each event: so the story holds what
the core knew and decided, and nothing had to be written down for it.
"""

import os
import sys
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from headrace_scheduler.decisions import ChoiceLog, Gauges
from headrace_scheduler.recording import Chunk
from headrace_scheduler.replay import Moment, chunks, nothing_of, read_file, replay, split
from headrace_scheduler.scheduler import Scheduler
from headrace_scheduler.sequence import OwnedRequest, SequenceState
from headrace_shared.errors import ProtocolError
from headrace_shared.messages import Admission, Outcome, Request, RequestId
from headrace_shared.record_messages import StoryLine

NICENESS = 10
LET_GO = {
    "let_go": "left to a peer that goes on with it, or to the queue",
    "hand_over": "handed over to a peer with its worker, which goes on with it",
    "forget": "dropped: its end had been told already",
}
"""Events that take a request from a scheduler which has not ended it."""


class Told(NamedTuple):
    """One thing that happened: a word for programs, words for people, and on which worker."""

    kind: str
    """taken, adopted, placed, prompt_computed, first_token, waits, choice_ended, ended or left."""
    text: str
    worker: str = ""


class _Choice(NamedTuple):
    """One choice of the request, as the core sees it at a moment."""

    state: SequenceState
    num_output: int
    is_prompt_computed: bool
    outcome: Outcome | None


View = dict[int, _Choice]


class _Teller:
    """Follows one request through the moments of a recording."""

    def __init__(self, request_id: RequestId) -> None:
        self._id = request_id
        self._before: View = {}
        self._owned: OwnedRequest | None = None
        self._gauges: Gauges | None = None
        """Of the core before a pass in which the request waits."""
        self._is_known = False

    def before(self, core: Scheduler, name: str, arguments: tuple[Any, ...]) -> None:
        self._owned = core.request(self._id)
        self._before = _view(self._owned)
        waits = any(choice.state is SequenceState.WAITING for choice in self._before.values())
        self._gauges = core.gauges() if name == "schedule" and waits else None

    def lines(self, moment: Moment) -> Iterator[Told]:
        before, after = self._before, _view(moment.core.request(self._id))
        if before and not after and (text := LET_GO.get(moment.name)):
            yield Told("left", text)
            return
        # The core drops a request when its last choice ends, and tells of its end in the pass after that.
        after = after or _view(self._owned)
        if not before and after:
            yield self._arrival(moment)
        yield from self._decided(moment)
        for choice, now in after.items():
            then = before.get(choice)
            if then is None:
                continue
            yield from self._changed(_named(choice, len(after)), then, now, moment)

    def _arrival(self, moment: Moment) -> Told:
        if moment.name != "add_request":
            worker = str(moment.arguments[0])
            return Told("adopted", f"taken over with the worker {worker}, which went on with it", worker)
        request: Request = moment.arguments[0]
        num_delivered: int = moment.arguments[3]
        logs: dict[int, ChoiceLog] = (moment.arguments[5] if len(moment.arguments) > 5 else None) or {}
        text = f"taken from the queue (message {moment.arguments[2]}, delivery {num_delivered}): "
        text += f"{len(request.prompt) // 4} prompt tokens, up to {request.stop.max_tokens} new ones"
        if request.num_choices > 1:
            text += f" for each of {request.num_choices} choices"
        known = sum(len(choice.output) for choice in logs.values())
        return Told("taken", text + (f"; the log already holds {known} tokens" if known else ""))

    def _decided(self, moment: Moment) -> Iterator[Told]:
        if moment.decisions is None:
            return
        for worker_id, credit in moment.decisions.credits.items():
            for admission in credit.admissions:
                if admission.request.request_id == self._id:
                    yield Told("placed", f"placed on {worker_id}: {self._why(admission)}", str(worker_id))
        for ended in moment.decisions.ended:
            if ended.event.request_id == self._id:
                reason = ended.event.code or ended.detail
                yield Told("ended", f"ended: {ended.event.outcome.value}" + (f" ({reason})" if reason else ""))

    def _why(self, admission: Admission) -> str:
        num_known = len(admission.request.prompt) // 4 + len(admission.output) // 4
        text = f"choice {admission.choice}, attempt {admission.attempt}, {len(admission.block_ids)} blocks, "
        text += f"{admission.num_cached} of {num_known} tokens cached there"
        if self._gauges is not None:
            workers = sorted(self._gauges.workers.items())
            text += "; then: " + ", ".join(
                f"{worker_id} {gauges.num_running} running, {gauges.num_backlog_tokens} tokens ahead, "
                f"{gauges.num_free} blocks free"
                for worker_id, gauges in workers
            )
        return text

    def _changed(self, name: str, then: _Choice, now: _Choice, moment: Moment) -> Iterator[Told]:
        if now.is_prompt_computed and not then.is_prompt_computed:
            yield Told("prompt_computed", f"{name}prompt computed")
        if now.num_output and not then.num_output:
            yield Told("first_token", f"{name}first token")
        if then.state is SequenceState.RUNNING and now.state in (SequenceState.WAITING, SequenceState.UNKNOWN):
            why = {
                "schedule": "preempted: its place or blocks were needed, or its worker drains",
                "worker_lost": f"lost its worker ({', '.join(map(str, moment.arguments[2:4]))})",
                "apply_progress": "dropped by its worker",
            }.get(moment.name, moment.name.replace("_", " "))
            yield Told("waits", f"{name}{why}; waits again with {now.num_output} tokens")
        if now.state is SequenceState.ENDED and then.state is not SequenceState.ENDED:
            outcome = now.outcome or Outcome.FINISHED
            what = "complete" if outcome is Outcome.FINISHED else outcome.value
            yield Told("choice_ended", f"{name}{what} with {now.num_output} tokens")


def _view(owned: OwnedRequest | None) -> View:
    view = {}
    for sequence in owned.sequences if owned is not None else ():
        num_computed = 0 if sequence.stay is None else sequence.stay.num_computed
        is_computed = owned is not None and num_computed >= owned.prompt_length
        view[sequence.choice] = _Choice(sequence.state, len(sequence.output), is_computed, sequence.outcome)
    return view


def story(recorded: Iterable[Chunk], request_id: RequestId) -> list[StoryLine]:
    """In the order of time, over all schedulers. Empty if the recording knows nothing of it. Raises ProtocolError."""
    tellers: dict[str, _Teller] = {}
    # One replay for each scheduler, so that `before` knows whose core it is shown.
    by_scheduler: dict[str, list[Chunk]] = {}
    for chunk in recorded:
        by_scheduler.setdefault(chunk.scheduler, []).append(chunk)
    lines = []
    for scheduler, own in by_scheduler.items():
        teller = tellers.setdefault(scheduler, _Teller(request_id))
        for moment in replay(own, teller.before):
            lines += [StoryLine(moment.wall, scheduler, *told) for told in teller.lines(moment)]
    return sorted(lines, key=lambda line: line.at)


def show(lines: list[StoryLine]) -> str:
    """One line each: the time of day, seconds since the first, the scheduler, the text."""
    start = lines[0].at
    return "".join(
        f"{datetime.fromtimestamp(line.at, UTC):%H:%M:%S.%f}"[:-3]
        + f"Z {line.at - start:+9.3f} s  {line.scheduler}  {line.text}\n"
        for line in lines
    )


def main(argv: list[str]) -> int:
    """With --json the lines are written as JSON, none included, and whatever else the machine does goes first. The file
    - is standard input."""
    as_json = argv[:1] == ["--json"]
    if as_json:
        os.nice(NICENESS)
    arguments = argv[as_json:]
    if len(arguments) != 2:
        sys.stderr.write("usage: python -m headrace_scheduler.story [--json] FILE REQUEST\n")
        return 2
    try:
        name, request_id = arguments
        messages = split(sys.stdin.buffer.read(), "the input") if name == "-" else read_file(Path(name))
        recorded = list(chunks(messages))
        lines = story(recorded, RequestId(request_id))
    except (ProtocolError, OSError) as error:
        sys.stderr.write(f"headrace explain: {error}\n")
        return 2
    if as_json:
        sys.stdout.buffer.write(msgspec.json.encode(lines))
        return 0
    if not lines:
        sys.stderr.write(f"headrace explain: {nothing_of(request_id, recorded)}\n")
        return 1
    sys.stdout.write(show(lines))
    return 0


def _named(choice: int, num_choices: int) -> str:
    return f"choice {choice}: " if num_choices > 1 else ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
