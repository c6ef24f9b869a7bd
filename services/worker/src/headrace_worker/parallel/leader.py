"""Rank 0's engine as its iteration loop sees it: whatever is asked of it, the other ranks are told first.

Every rank has an engine for its part of the model and is given the same calls in the same order. So the loop runs once,
and the engines agree in collective operations without a word about what they compute.
"""

from array import array
from collections.abc import Sequence

from headrace_shared.codec import pack_ids
from headrace_shared.messages import Admission, SequenceId
from headrace_worker.iteration import Engine, EngineFacts, SampledToken, SequenceSlice
from headrace_worker.parallel.channel import LeaderChannel
from headrace_worker.parallel.frames import Add, Iterate, Rest, SliceFrame
from headrace_worker.parallel.place import RankPlace
from headrace_worker.parallel.pulse import Pulse


class LeaderEngine:
    """Implements `iteration.Engine` on the local engine and those of all other ranks."""

    def __init__(self, engine: Engine, channel: LeaderChannel, place: RankPlace, pulse: Pulse) -> None:
        self._engine = engine
        self._channel = channel
        self._pulse = pulse
        self._is_pipeline = place.pipeline_parallel > 1
        self._facts = engine.facts._replace(num_stages=place.pipeline_parallel)
        self._num_blocks_sent: dict[SequenceId, int] = {}
        """Length of each sequence's block table as the followers know it."""
        # What they are to do as well goes out with the next command.
        self._removed: list[SequenceId] = []
        self._num_collected = 0

    @property
    def facts(self) -> EngineFacts:
        return self._facts

    @property
    def adapters(self) -> None:
        """Their matrices are not divided."""
        return None

    @property
    def looks_ahead(self) -> bool:
        return self._engine.looks_ahead

    def add(self, admission: Admission) -> None:
        self._channel.send(Add(*self._done(), admission))
        self._num_blocks_sent[admission.sequence_id] = len(admission.block_ids)
        self._engine.add(admission)

    def is_ready(self, sequence_id: SequenceId, *, wait: bool) -> bool:
        return self._engine.is_ready(sequence_id, wait=wait)

    def remove(self, sequence_id: SequenceId) -> None:
        self._removed.append(sequence_id)
        del self._num_blocks_sent[sequence_id]
        self._engine.remove(sequence_id)

    def rest(self) -> None:
        self._channel.send(Rest(*self._done()))
        self._engine.rest()

    def submit(self, slices: Sequence[SequenceSlice]) -> None:
        tokens = array("I")
        for piece in slices:
            if piece.token_ids is not None:
                tokens.extend(piece.token_ids)
        self._pulse.begin()
        self._channel.send(Iterate(*self._done(), [self._frame(piece) for piece in slices], pack_ids(tokens)))
        self._engine.submit(slices)

    def collect(self) -> list[SampledToken]:
        tokens = self._engine.collect()
        if self._is_pipeline:
            tokens = self._channel.receive()
        self._num_collected += 1
        self._pulse.end()
        return tokens

    def _frame(self, piece: SequenceSlice) -> SliceFrame:
        num_sent = self._num_blocks_sent[piece.sequence_id]
        self._num_blocks_sent[piece.sequence_id] = len(piece.block_ids)
        return SliceFrame(
            piece.sequence_id,
            piece.start,
            piece.num_tokens,
            piece.token_ids is not None,
            piece.samples,
            piece.num_drafts,
            list(piece.block_ids[num_sent:]),
            list(piece.targets),
        )

    def _done(self) -> tuple[int, list[SequenceId]]:
        """Iterations collected and sequences removed since the last command."""
        done = (self._num_collected, self._removed)
        self._num_collected, self._removed = 0, []
        return done
