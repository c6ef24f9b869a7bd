"""Any rank but the first: does to its engine what the leader does to its own, for as long as there is a leader."""

from typing import NoReturn

from headrace_shared.codec import unpack_ids
from headrace_shared.messages import BlockId, SequenceId
from headrace_worker.iteration import Engine, SequenceSlice
from headrace_worker.parallel.channel import FollowerChannel
from headrace_worker.parallel.frames import Add, Iterate, Rest, ToFollower
from headrace_worker.parallel.place import RankPlace
from headrace_worker.parallel.pulse import Pulse


class Follower:
    """Iterations are collected when the leader has done so. Only the sampler of a pipeline is ahead of it, since the
    leader waits for what it has sampled: it collects as soon as an iteration is finished or no command waits."""

    def __init__(self, engine: Engine, channel: FollowerChannel, place: RankPlace, pulse: Pulse) -> None:
        self._engine = engine
        self._channel = channel
        self._answers = place.is_sampler
        self._pulse = pulse
        self._num_outstanding = 0
        self._block_ids: dict[SequenceId, list[BlockId]] = {}

    def run(self) -> NoReturn:
        """Exceptions of the engine pass through: it is beyond repair then, and so is the group."""
        while True:
            command = self._channel.receive(wait=not (self._answers and self._num_outstanding))
            if command is None:
                self._collect()
            else:
                self._obey(command)

    def _obey(self, command: ToFollower) -> None:
        if not self._answers:
            for _ in range(command.num_collected):
                self._collect()
        for sequence_id in command.removed:
            del self._block_ids[sequence_id]
            self._engine.remove(sequence_id)
        if isinstance(command, Add):
            self._block_ids[command.admission.sequence_id] = list(command.admission.block_ids)
            self._engine.add(command.admission)
            return
        if isinstance(command, Rest):
            self._engine.rest()
            return
        self._pulse.begin()
        self._engine.submit(self._slices(command))
        self._pulse.end()
        self._num_outstanding += 1
        if self._answers and not self._engine.looks_ahead:
            self._collect()

    def _collect(self) -> None:
        self._pulse.begin()
        tokens = self._engine.collect()
        self._pulse.end()
        self._num_outstanding -= 1
        if self._answers:
            self._channel.answer(tokens)

    def _slices(self, command: Iterate) -> list[SequenceSlice]:
        token_ids = unpack_ids(command.token_ids)
        slices = []
        position = 0
        for frame in command.slices:
            block_ids = self._block_ids[frame.sequence_id]
            block_ids += frame.new_block_ids
            tokens = None
            if frame.is_known:
                tokens = token_ids[position : position + frame.num_tokens]
                position += frame.num_tokens
            slices.append(
                SequenceSlice(
                    frame.sequence_id,
                    frame.start,
                    frame.num_tokens,
                    tokens,
                    block_ids,
                    frame.samples,
                    frame.num_drafts,
                    frame.targets,
                )
            )
        return slices
