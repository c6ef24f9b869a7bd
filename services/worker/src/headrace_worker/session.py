"""What the worker owes its scheduler and the routers: obeys one epoch's grants, publishes tokens, then progress.

Everything here is synchronous and quick, and runs on the I/O process's event loop. Token frames go out before the
progress that tells of them, on the same connection: whoever sees a finish in a progress knows that the log has the
tokens.
"""

import contextlib
from collections.abc import Callable, Iterable

import structlog

from headrace_shared import codec
from headrace_shared.bus import Bus, Message
from headrace_shared.errors import BusError, PayloadTooLarge, ProtocolError
from headrace_shared.leases import LEASE_TTL_S
from headrace_shared.messages import (
    Adopt,
    ControlMessage,
    DrainVerdict,
    Grant,
    Progress,
    SchedulerId,
    SequenceId,
    Snapshot,
    TokenFrame,
    WorkerId,
)
from headrace_shared.subjects import progress_subject, tokens_subject
from headrace_worker.engine_frames import Iteration, Reset, Rest
from headrace_worker.mirror import MAX_COALESCED, Mirror, MirrorSequence
from headrace_worker.stay_watch import StayWatch

HEARTBEAT_S = 0.4
"""Progress flows at least this often; the contract allows 0.5."""
ENVELOPE_BYTES = 1024
"""Room for a message's own fields around the sequences in it."""
TOO_LARGE = "The log-probabilities of one token exceed what the broker takes in a message."

log = structlog.get_logger(__name__)


class Session:
    """One worker's side of the protocol. `send_to_engine` takes encoded frames; `now` is monotonic time."""

    def __init__(
        self,
        worker_id: WorkerId,
        bus: Bus,
        mirror: Mirror,
        send_to_engine: Callable[[bytes], None],
        on_adopted: Callable[[], None],
        now: float,
        on_verdict: Callable[[DrainVerdict], None] = lambda _: None,
        watch: StayWatch | None = None,
    ) -> None:
        """`on_verdict`: of the scheduler that holds the lease."""
        self._worker_id = worker_id
        self._bus = bus
        self._send_to_engine = send_to_engine
        self._on_adopted = on_adopted
        self._watch = watch
        self._on_verdict = on_verdict
        self.mirror = mirror
        self._scheduler: SchedulerId | None = None
        self._epoch = 0
        """The highest seen since the last time that everything was dropped."""
        self._grant_seen = 0
        self._resync = False
        self._progress_number = 0
        self._progress_sent_at = now
        self._ticked_at = now
        self._generation = 0
        self._dropped: list[MirrorSequence] = []
        """In the present outage, if it is long."""
        self.is_suspended = False
        self.num_iterations = 0
        """Of the engine since its start, as it last said."""
        self._num_coalesced = 0
        self._num_prefill_tokens = 0
        self._elapsed_s = 0.0
        self.num_output_tokens = 0
        """Sampled since the start."""
        self.num_prefilled = 0
        """Prompt tokens computed since the start."""
        self.busy_s = 0.0
        """Spent in iterations since the start."""
        self.iterated_at = now
        """When the engine last showed that it lives."""

    @property
    def is_empty(self) -> bool:
        """It holds no sequence, and everything is told."""
        mirror = self.mirror
        return not (mirror.num_sequences or mirror.has_report or mirror.has_unpublished)

    @property
    def has_more(self) -> bool:
        """Tokens wait to be published."""
        return self.mirror.has_unpublished

    @property
    def generation(self) -> int:
        return self._generation

    @property
    def epoch(self) -> int:
        """Of the lease it obeys; 0 if none."""
        return self._epoch if self._scheduler is not None else 0

    def on_control(self, message: Message, now: float) -> None:
        """A message on the worker's grants subject."""
        try:
            control: ControlMessage = codec.decode(message.data, ControlMessage)
        except ProtocolError as error:
            log.warning("control message dropped", error=str(error))
            return
        if self.is_suspended:
            return
        if control.worker != self._worker_id:
            log.warning("control message for another worker dropped", worker=control.worker)
        elif isinstance(control, Adopt):
            self._adopt(control, now)
        elif isinstance(control, DrainVerdict):
            if control.epoch == self.epoch:
                self._on_verdict(control)
        else:
            self._apply(control, message.data, now)

    def on_iteration(self, iteration: Iteration, now: float) -> None:
        """Where first tokens are among others, only they are published: to be followed by `publish` as soon as they are
        on their way, if anything is left (`has_more`)."""
        self.iterated_at = now
        self.num_iterations = iteration.num_iterations
        if iteration.generation != self._generation:
            return
        self._num_prefill_tokens += iteration.num_prefill_tokens
        self.num_prefilled += iteration.num_prefill_tokens
        self._elapsed_s += iteration.elapsed_s
        self.busy_s += iteration.elapsed_s
        self._num_coalesced += 1
        self.num_output_tokens += self.mirror.apply_rows(iteration.rows, iteration.released)
        if self._watch is not None:
            self._watch.on_iteration(iteration, now)
        waiting = self.mirror.unpublished()
        firsts = [sequence for sequence in waiting if not sequence.num_published]
        if not firsts or len(firsts) == len(waiting) or not self._publish_all(firsts):
            self.publish(now)

    def publish(self, now: float) -> None:
        """All tokens that wait, and if need be what the scheduler should know."""
        if self._publish_tokens() and (self.mirror.is_report_urgent or self._num_coalesced >= MAX_COALESCED):
            self._report(now)

    def suspend(self) -> None:
        """Obeys nobody, and holds nothing, until `resume`. What ran is others' once they hear of the worker's state."""
        self.is_suspended = True
        self._forget()
        self._send_to_engine(codec.encode(Rest(generation=self._generation)))

    def resume(self) -> None:
        self.is_suspended = False

    def on_reconnect(self, now: float, *, is_log_lost: bool = False) -> None:
        """What was sent just before the connection broke may be lost. `is_log_lost`: so is all that the token log held.
        Then whoever takes up what was dropped here goes on behind what is told of it now."""
        dropped, self._dropped = self._dropped, []
        if is_log_lost and dropped:
            log.info("the token log is lost: what was dropped is told again", num_sequences=len(dropped))
            with contextlib.suppress(BusError):  # it is generated again
                for sequence in dropped:
                    self._publish(sequence, MirrorSequence.mark_published)
        self.publish_again()
        self.tick(now)

    def publish_again(self) -> None:
        """The log may have missed something. Routers drop what they have seen already."""
        self.mirror.publish_again()
        self._publish_tokens()

    def tick(self, now: float) -> None:
        """To be called about every 50 ms: sends what waits, and drops everything when it was cut off for too long."""
        frozen_for_s = now - self._ticked_at
        self._ticked_at = now
        if max(frozen_for_s, self._bus.disconnected_for_s) > LEASE_TTL_S and self._scheduler is not None:
            self._drop_all()
        if not self._bus.is_connected:
            return
        published = self._publish_tokens()
        due = now - self._progress_sent_at >= HEARTBEAT_S
        if published and (due or self.mirror.has_report):
            self._report(now)

    def _adopt(self, adopt: Adopt, now: float) -> None:
        if adopt.epoch <= self._epoch:
            log.info("adoption by a lower epoch ignored", epoch=adopt.epoch, scheduler=adopt.scheduler)
            return
        log.info("adopted", scheduler=adopt.scheduler, epoch=adopt.epoch, num_sequences=self.mirror.num_sequences)
        self._scheduler = adopt.scheduler
        self._epoch = adopt.epoch
        self._grant_seen = 0
        self._resync = False
        self._progress_number = 0
        self._publish_tokens()
        limit = self._bus.max_payload - ENVELOPE_BYTES
        dropped = self.mirror.drop_larger_than(limit)
        if dropped:
            self._release(dropped)
        parts = self.mirror.snapshot(limit)
        subject = progress_subject(adopt.scheduler)
        try:
            for index, part in enumerate(parts):
                message = Snapshot(
                    worker=self._worker_id, epoch=adopt.epoch, part=index, num_parts=len(parts), sequences=part
                )
                self._bus.publish(subject, codec.encode(message))
        except BusError as error:
            # The scheduler misses a part, and adopts again.
            log.warning("snapshot not sent", error=str(error))
        self._progress_sent_at = now
        self._on_adopted()

    def _apply(self, grant: Grant, data: bytes, now: float) -> None:
        if self._scheduler is None or grant.epoch != self._epoch or grant.number <= self._grant_seen or self._resync:
            return
        if grant.number != self._grant_seen + 1:
            log.warning("grant missing", expected=self._grant_seen + 1, got=grant.number)
            self._resync = True
            self._report(now)
            return
        self._grant_seen = grant.number
        if not self.mirror.can_run:
            # Nothing was expected of the engine until now.
            self.iterated_at = now
        self.mirror.apply_grant(grant)
        if self._watch is not None and grant.admissions:
            self._watch.admitted(grant.admissions, now)
        if grant.admissions or grant.extensions or grant.releases:
            self._send_to_engine(data)

    def _publish_tokens(self) -> bool:
        """Whether no token waits any more."""
        return self._publish_all(self.mirror.unpublished())

    def _publish_all(self, sequences: Iterable[MirrorSequence]) -> bool:
        """Whether none of theirs waits any more."""
        try:
            for sequence in sequences:
                if not self._publish(sequence, self.mirror.mark_published):
                    self.mirror.give_up(sequence, TOO_LARGE)
        except BusError:
            return False  # it goes out with the next tokens, or when the connection is back
        return True

    def _publish(self, sequence: MirrorSequence, mark: Callable[[MirrorSequence, TokenFrame], bool]) -> bool:
        """False: no message can hold the rest. Raises BusError."""
        request = sequence.admission.request
        subject = tokens_subject(request.router, request.request_id)
        complete = False
        while not complete:
            frame = sequence.next_frame()
            try:
                self._bus.publish(subject, codec.encode(frame))
            except (PayloadTooLarge, ProtocolError) as error:
                # Waiting would not help, and nobody behind it would be told anything.
                if not sequence.shorten(frame):
                    log.error("tokens too large for the broker", request_id=request.request_id, error=str(error))
                    return False
            else:
                complete = mark(sequence, frame)
        return True

    def _report(self, now: float) -> None:
        """Sends all that is unreported, or a heartbeat."""
        if self._scheduler is None:
            return
        while True:
            rows, released = self.mirror.report(self._bus.max_payload - ENVELOPE_BYTES)
            progress = Progress(
                worker=self._worker_id,
                epoch=self._epoch,
                number=self._progress_number + 1,
                grant_seen=self._grant_seen,
                resync=self._resync,
                sequences=tuple(rows),
                released=tuple(released),
                num_iterations=self.num_iterations,
                num_prefill_tokens=self._num_prefill_tokens,
                elapsed_s=self._elapsed_s,
            )
            try:
                self._bus.publish(progress_subject(self._scheduler), codec.encode(progress))
            except BusError:
                return  # unnumbered still: the next attempt says it all
            self._progress_number += 1
            self.mirror.mark_reported(rows, released, self._progress_number)
            self._progress_sent_at = now
            self._num_coalesced = 0
            self._num_prefill_tokens = 0
            self._elapsed_s = 0.0
            if not self.mirror.has_report:
                return

    def _drop_all(self) -> None:
        log.warning("cut off from the broker: all sequences dropped", num_sequences=self.mirror.num_sequences)
        dropped = self.mirror.drop_all()
        self._dropped = [] if self._bus.is_connected else dropped
        self._forget()
        self._send_to_engine(codec.encode(Reset(generation=self._generation)))

    def _forget(self) -> None:
        self._scheduler = None
        self._epoch = 0  # with nothing held there is nothing to fence; epochs may have started anew meanwhile
        self.mirror.clear()
        if self._watch is not None:
            self._watch.clear()
        self._generation += 1

    def _release(self, sequence_ids: list[SequenceId]) -> None:
        log.warning("sequences too large for a snapshot dropped", num_sequences=len(sequence_ids))
        grant = Grant(
            worker=self._worker_id, epoch=self._epoch, number=0, progress_seen=0, releases=tuple(sequence_ids)
        )
        self._send_to_engine(codec.encode(grant))
