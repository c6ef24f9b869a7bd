"""The world around the scheduler's core, simulated: queue, token log, a router's eyes, workers, a shell, and all that
can go wrong between them.

Everything is a method that does one thing at one moment, so that a history is a list of calls. After every call the
core's integrity is checked (I1); terminal events are counted as they are published (I2).
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace_scheduler.decisions import OUTCOMES, AddResult, ChoiceLog, Credit, LossCause, SchedulerConfig, WorkerFacts
from headrace_scheduler.scheduler import Scheduler
from headrace_shared.messages import (
    Admission,
    CancelReason,
    FinishReason,
    Grant,
    Outcome,
    Progress,
    Request,
    RequestEnded,
    RequestId,
    WorkerId,
)
from headrace_shared.record_messages import LossRecord
from tests.scheduler import oracle
from tests.scheduler.choice_view import ChoiceView
from tests.scheduler.model_worker import ModelWorker

NOW = 0.0


@dataclass
class QueuedMessage:
    request: Request
    stream_sequence: int
    num_delivered: int = 0
    acknowledged: bool = False
    cancels: list[tuple[int | None, CancelReason]] = field(default_factory=list)
    """Tombstones."""
    choices: list[ChoiceView] = field(default_factory=list)
    losses: LossRecord | None = None
    """As stored."""
    ended: RequestEnded | None = None

    def uncut(self) -> list[int]:
        """Choices that nobody cancelled."""
        cut = {choice for choice, _ in self.cancels}
        return [] if None in cut else [choice for choice in range(len(self.choices)) if choice not in cut]

    def logs(self) -> dict[int, ChoiceLog]:
        return {i: view.log() for i, view in enumerate(self.choices) if view.frames}


@dataclass
class Link:
    """A worker and the messages on their way to and from it."""

    worker: ModelWorker
    grants: deque[Grant] = field(default_factory=deque)
    reports: deque[Progress] = field(default_factory=deque)
    grant_number: int = 0
    progress_seen: int = 0
    adopted: bool = False


class ModelFleet:
    def __init__(self, config: SchedulerConfig, worker_facts: Sequence[WorkerFacts], depth: int) -> None:
        """Workers are started with these facts in turn."""
        self._config = config
        self._facts = worker_facts
        self._depth = depth
        self.scheduler = Scheduler(config)
        self.messages: dict[RequestId, QueuedMessage] = {}
        self.links: dict[WorkerId, Link] = {}
        self.unrecorded: list[RequestId] = []
        self.unread: list[RequestId] = []
        """Whose log the core waits for."""
        self._num_workers = 0
        self._epoch = 0
        self.num_replacements = 0
        self.num_false_losses = 0
        """Workers that were taken for lost and went on."""
        self.num_caught_up = 0
        """Tokens that a lost worker had told only to the log."""
        self.num_preemptions = 0
        self.num_moved = 0
        self.num_cached_tokens = 0

    # What clients do.

    def send(self, request: Request) -> None:
        message = QueuedMessage(request, stream_sequence=len(self.messages) + 1)
        message.choices = [ChoiceView(choice) for choice in range(request.num_choices)]
        self.messages[request.request_id] = message
        self.deliver(message)

    def cancel(self, message: QueuedMessage, choice: int | None, reason: CancelReason) -> None:
        message.cancels.append((choice, reason))
        self.scheduler.cancel(message.request.request_id, choice, reason, NOW)
        self._check()

    # What the shell does.

    def deliver(self, message: QueuedMessage) -> None:
        """The queue offers a message that was not acknowledged (again)."""
        if message.acknowledged:
            return
        message.num_delivered += 1
        if message.ended is not None:
            message.acknowledged = True
            return
        request_id = message.request.request_id
        ack = f"ack.{message.num_delivered}"
        logs = message.logs() if message.num_delivered > 1 else None
        result = self.scheduler.add_request(
            message.request, ack, message.stream_sequence, message.num_delivered, NOW, logs, message.losses
        )
        assert result is not AddResult.ENDED, "terminal event neither published nor about to be"
        self._replay_cancels(message)
        assert dict(self.scheduler.ack_subjects()).get(request_id, ack) == ack
        self._check()

    def schedule(self) -> None:
        for request_id in self.unrecorded:
            self.scheduler.recorded(request_id, NOW)
        self.unrecorded.clear()
        self._read_logs()
        decisions = self.scheduler.schedule(NOW)
        for request_id, record in decisions.losses:
            self.messages[request_id].losses = record
            self.unrecorded.append(request_id)
        for worker_id, credit in decisions.credits.items():
            self._grant(self.links[worker_id], credit)
        for ended in decisions.ended:
            message = self.messages[ended.event.request_id]
            assert message.ended is None, f"two terminal events of {ended.event.request_id}"
            message.ended = ended.event
            message.acknowledged = True
            if ended.dead is not None:
                assert message.losses is not None, "given up at its first loss"
            if ended.event.outcome is Outcome.FINISHED:
                is_repaired = any([message.choices[choice].repair() for choice in message.uncut()])
                assert self.num_replacements or not is_repaired, "a router was told the end before the last token"
        self._check()

    def heartbeat(self, link: Link) -> None:
        """An empty grant: tells the worker what progress was seen."""
        if link.adopted:
            self._grant(link, Credit())

    def adopt(self, link: Link) -> None:
        """A new epoch, whoever had the last one. What was on its way is of an old epoch, and lost."""
        self._epoch += 1
        link.grants.clear()
        link.reports.clear()
        link.grant_number = link.progress_seen = 0
        link.adopted = True
        snapshot = link.worker.adopt(self._epoch)
        adoption = self.scheduler.add_worker(link.worker.worker_id, link.worker.facts, snapshot, NOW, reads_logs=True)
        self.unread += adoption.dropped
        for request_id in adoption.adopted:
            message = self.messages[request_id]
            if message.ended is not None:
                self.scheduler.forget(request_id)
            else:
                self.scheduler.restore(request_id, message.logs(), NOW)
                self._replay_cancels(message)
        self._check()

    def replace_scheduler(self) -> None:
        """The process died. Its successor adopts the workers one by one, and is offered the messages by and by."""
        gauges = self.scheduler.gauges()
        self.num_preemptions += gauges.num_preemptions
        self.num_moved += gauges.num_moved
        self.num_cached_tokens += gauges.num_cached_tokens
        self.num_replacements += 1
        self.scheduler = Scheduler(self._config)
        self.unread.clear()
        for link in self.links.values():
            link.adopted = False
            link.reports.clear()

    def set_accepting(self, link: Link, accepting: bool) -> None:
        self.scheduler.set_accepting(link.worker.worker_id, accepting)
        self._check()

    def drain(self, link: Link) -> None:
        self.set_accepting(link, False)
        self.scheduler.evacuate(link.worker.worker_id)
        self._check()

    # What workers and the broker do.

    def start_worker(self) -> None:
        facts = self._facts[self._num_workers % len(self._facts)]
        self._num_workers += 1
        worker_id = WorkerId(f"worker-{self._num_workers}")
        link = Link(ModelWorker(worker_id, facts, self._depth, self._publish))
        self.links[worker_id] = link
        self.adopt(link)

    def kill_worker(self, link: Link, cause: LossCause = LossCause.VANISHED) -> None:
        del self.links[link.worker.worker_id]
        self.unread += self.scheduler.worker_lost(link.worker.worker_id, NOW, cause, reads_logs=True)
        self._check()

    def cut_off(self, link: Link, *, too_long: bool) -> None:
        """The scheduler gives the worker up; it comes back, with its sequences or without."""
        self.unread += self.scheduler.worker_lost(link.worker.worker_id, NOW, reads_logs=True)
        self.num_false_losses += not too_long
        link.adopted = False
        link.grants.clear()
        link.reports.clear()
        if too_long:
            link.worker.drop_all()
        self._check()

    def lose_grant(self, link: Link) -> None:
        if link.grants:
            link.grants.popleft()

    def deliver_grant(self, link: Link) -> None:
        if link.grants:
            link.worker.apply(link.grants.popleft())

    def iterate(self, link: Link) -> None:
        link.worker.iterate()

    def report(self, link: Link) -> None:
        progress = link.worker.progress()
        if progress is not None and link.adopted:
            link.reports.append(progress)

    def deliver_report(self, link: Link) -> None:
        if not link.reports:
            return
        progress = link.reports.popleft()
        if progress.resync:
            self.adopt(link)
            return
        assert progress.number == link.progress_seen + 1
        link.progress_seen = progress.number
        self.scheduler.apply_progress(link.worker.worker_id, progress, NOW)
        self._check()

    # The end of a history.

    def settle(self) -> None:
        """No more faults: everything must end within a bound. Then nothing may be left anywhere."""
        if not self.links:
            self.start_worker()
        for link in self.links.values():
            self.set_accepting(link, True)
            if not link.adopted:
                self.adopt(link)
        owned = dict(self.scheduler.ack_subjects())
        for message in self.messages.values():
            if message.request.request_id not in owned:
                self.deliver(message)
        budget = 60 + 12 * sum(
            message.request.stop.max_tokens * message.request.num_choices + len(message.request.prompt) // 4
            for message in self.messages.values()
        )
        while not all(message.acknowledged for message in self.messages.values()):
            budget -= 1
            assert budget > 0, f"starved: {self.scheduler.gauges()}"
            self.turn()
        for _ in range(8):
            self.turn()
        self._check_end()

    def turn(self) -> None:
        """One round in which everything works."""
        self.schedule()
        for link in list(self.links.values()):
            while link.grants:
                self.deliver_grant(link)
            self.iterate(link)
            self.report(link)
            while link.reports:
                self.deliver_report(link)
            self.heartbeat(link)

    def _check_end(self) -> None:
        gauges = self.scheduler.gauges()
        assert (gauges.num_requests, gauges.num_waiting, gauges.num_running) == (0, 0, 0), gauges
        for worker in gauges.workers.values():
            assert worker.num_free == worker.num_blocks, worker
        for link in self.links.values():
            assert link.worker.holds_nothing
        self.num_preemptions += gauges.num_preemptions
        self.num_moved += gauges.num_moved
        self.num_cached_tokens += gauges.num_cached_tokens
        for message in self.messages.values():
            ended = message.ended
            assert ended is not None, message.request.request_id
            if ended.outcome is Outcome.FINISHED:
                self._check_answer(message)
            elif ended.code == "request_quarantined":
                assert message.losses is not None
            elif ended.outcome is Outcome.FAILED:
                assert ended.code == "context_length_exceeded" and not self._fits(message.request), ended
            else:
                assert ended.outcome in {OUTCOMES[reason] for _, reason in message.cancels}, ended

    def _check_answer(self, message: QueuedMessage) -> None:
        uncut = message.uncut()
        for choice, view in enumerate(message.choices):
            expected = oracle.answer(message.request, choice)
            where = (message.request.request_id, choice, view, expected)
            assert view.shown == expected.tokens[: len(view.shown)], where
            assert choice not in uncut or (view.shown, view.shown_finish) == expected, where

    def _fits(self, request: Request) -> bool:
        """On every worker."""
        return len(request.prompt) // 4 + request.stop.max_tokens <= min(facts.context for facts in self._facts)

    def _read_logs(self) -> None:
        for request_id in self.unread:
            owned = self.scheduler.request(request_id)
            if owned is not None:
                before = owned.num_generated
                for sequence in owned.sequences:
                    known = ChoiceLog(list(sequence.output), sequence.last_attempt or 0)
                    self.messages[request_id].choices[sequence.choice].check_tail(known)
                self.scheduler.restore(request_id, self.messages[request_id].logs(), NOW)
                self.num_caught_up += owned.num_generated - before
        self.unread.clear()

    def _grant(self, link: Link, credit: Credit) -> None:
        for admission in credit.admissions:
            told = self.messages[admission.request.request_id].choices[admission.choice].logged
            is_behind = len(admission.output) // 4 >= len(told)
            # Who is taken for lost, or left by a scheduler that is gone, may go on telling for a while.
            assert is_behind or self.num_replacements or self.num_false_losses, (admission, told)
        link.grant_number += 1
        link.grants.append(
            Grant(
                worker=link.worker.worker_id,
                epoch=link.worker.epoch,
                number=link.grant_number,
                progress_seen=link.progress_seen,
                admissions=tuple(credit.admissions),
                extensions=tuple(credit.extensions),
                releases=tuple(credit.releases),
            )
        )

    def _publish(self, admission: Admission, index: int, tokens: list[int], finish: FinishReason | None) -> None:
        view = self.messages[admission.request.request_id].choices[admission.choice]
        first = view.stays.setdefault(admission.attempt, admission.sequence_id)
        assert self.num_replacements or first == admission.sequence_id, f"attempt {admission.attempt} twice"
        view.take(admission, index, tokens, finish)

    def _replay_cancels(self, message: QueuedMessage) -> None:
        for choice, reason in message.cancels:
            self.scheduler.cancel(message.request.request_id, choice, reason, NOW)

    def _check(self) -> None:
        self.scheduler.check_integrity()
