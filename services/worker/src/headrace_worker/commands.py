"""Hears what the worker is to become, and carries out what follows from that (`duty.py`)."""

import contextlib
import time
from collections.abc import Callable

import structlog

from headrace_shared import codec
from headrace_shared.bus import Bus, Message
from headrace_shared.errors import BusError, ProtocolError
from headrace_shared.fleet_messages import WorkerCommand, WorkerState
from headrace_shared.messages import WorkerId
from headrace_shared.subjects import commands_subject, replies_subject
from headrace_worker.command_guard import CommandGuard
from headrace_worker.duty import Action, Duty

TYPICAL_PROMOTION_S = 0.5
"""Until a scheduler has a worker that was promoted; said until there is a measurement."""

log = structlog.get_logger(__name__)


class Commands:
    """`carry_out` is called for each action, `on_change` when what Hello says has changed."""

    def __init__(
        self,
        worker_id: WorkerId,
        bus: Bus,
        duty: Duty,
        carry_out: Callable[[Action], None],
        on_change: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._worker_id = worker_id
        self._bus = bus
        self._duty = duty
        self._carry_out = carry_out
        self._on_change = on_change
        self._clock = clock
        self._wall_clock = wall_clock
        self._guard = CommandGuard()
        self._promoted_at: float | None = None
        self._promotion_s = TYPICAL_PROMOTION_S

    @property
    def promotion_s(self) -> float:
        """For Hello: how long it takes from a command until a scheduler has the worker."""
        return self._promotion_s if self._duty.state is WorkerState.PARKED else 0.0

    async def listen(self) -> None:
        """Raises BusUnavailable."""
        await self._bus.subscribe(commands_subject(self._worker_id), self._on_command)

    def act(self, change: Callable[[Duty, float], None]) -> None:
        """Makes a change to the duty, and does all that follows."""
        duty = self._duty
        before = (duty.state, duty.is_parking, duty.epoch)
        change(duty, self._clock())
        for action in duty.take_actions():
            self._carry_out(action)
        if before[0] is WorkerState.PARKED and duty.state is WorkerState.READY:
            self._promoted_at = self._clock()
        if before != (duty.state, duty.is_parking, duty.epoch):
            if before[0] is not duty.state:
                log.info("state", state=duty.state.value)
            self._on_change()
        for sender, reply in duty.take_replies():
            with contextlib.suppress(BusError):  # who has heard nothing asks again
                self._bus.publish(replies_subject(sender), codec.encode(reply))

    def on_adopted(self) -> None:
        """A scheduler has it."""
        if self._promoted_at is not None:
            self._promotion_s = self._clock() - self._promoted_at
            self._promoted_at = None

    def _on_command(self, message: Message) -> None:
        try:
            command = codec.decode(message.data, WorkerCommand)
        except ProtocolError as error:
            log.warning("command dropped", error=str(error))
            return
        if command.worker != self._worker_id:
            log.warning("command for another worker dropped", worker=command.worker)
            return
        problem = self._guard.problem(command, self._wall_clock())
        if problem:
            log.warning("command dropped", error=problem, kind=command.kind.value, sender=command.sender)
            return
        log.info("command", kind=command.kind.value, sender=command.sender, epoch=command.epoch)
        self.act(lambda duty, now: duty.on_command(command, now))
