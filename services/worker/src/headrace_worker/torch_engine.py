"""The torch engine: weights, cache and sampling of one model on one device. See `iteration.Engine` for its contract."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from headrace_shared.fleet_messages import ModelCard
from headrace_shared.messages import Admission, SequenceId
from headrace_worker.adapters.store import AdapterStore
from headrace_worker.constraint import Constraints
from headrace_worker.forward import Forward
from headrace_worker.inputs import Inputs, build_inputs
from headrace_worker.iteration import EngineFacts, SampledToken, SequenceSlice
from headrace_worker.kv_cache import KVCache
from headrace_worker.pooling import Pooling, packed
from headrace_worker.sampling import Drawn, SamplingState, drawn_greedily, sample
from headrace_worker.scoring import merged, score, targets_of


class TorchEngine:
    """Computes each iteration within `submit`; `collect` only hands out its result."""

    def __init__(
        self,
        forward: Forward,
        cache: KVCache,
        card: ModelCard,
        *,
        context: int,
        max_sequences: int,
        tokens_per_iteration: int,
        device: torch.device,
        dtype: torch.dtype,
        samples: bool = True,
        max_drafts: int = 0,
        adapters: AdapterStore | None = None,
        pooling: Pooling | None = None,
    ) -> None:
        """`samples`: `forward` returns logits that are sampled from here; else that is another rank's business.
        `pooling`: where there are embeddings to be made."""
        self.cache = cache
        self.adapters = adapters
        self._pooling = pooling if samples else None
        self._forward = forward
        self._device = device
        self._samples = samples
        self._states: dict[SequenceId, SamplingState] = {}
        # Threads that compute masks and those of the forward pass get in each other's way where cores are few.
        self._constraints = Constraints(card, max(1, torch.get_num_threads() // 4))
        self._finished: list[list[SampledToken]] = []
        self._facts = EngineFacts(
            card=card,
            num_blocks=cache.num_blocks,
            block_size=cache.block_size,
            context=context,
            max_sequences=max_sequences,
            tokens_per_iteration=tokens_per_iteration,
            device=str(device),
            dtype=str(dtype).removeprefix("torch."),
            max_drafts=max_drafts,
        )

    @property
    def facts(self) -> EngineFacts:
        return self._facts

    @property
    def looks_ahead(self) -> bool:
        return False

    def add(self, admission: Admission) -> None:
        if self._samples:
            constraint = self._constraints.of(admission)
            self._states[admission.sequence_id] = SamplingState(admission, self._facts.card.vocab_size, constraint)
        if self.adapters is not None:
            self.adapters.use(admission)
        if self._pooling is not None:
            self._pooling.add(admission)
        with torch.inference_mode():
            self.cache.copy_blocks(admission.copies)
            offset = admission.num_cached % self.cache.block_size
            if offset and self._forward.reads_unwritten:
                # What follows the shared part was the source's own.
                self.cache.clear_after(admission.block_ids[admission.num_cached // self.cache.block_size], offset)

    def remove(self, sequence_id: SequenceId) -> None:
        state = self._states.pop(sequence_id, None)
        if state is not None and state.constraint is not None:
            state.constraint.abandon()
        if self.adapters is not None:
            self.adapters.leave(sequence_id)
        if self._pooling is not None:
            self._pooling.remove(sequence_id)

    def is_ready(self, sequence_id: SequenceId, *, wait: bool) -> bool:
        state = self._states.get(sequence_id)
        if state is None or state.constraint is None:
            return True
        return state.constraint.is_ready or (wait and state.constraint.wait())

    def rest(self) -> None:
        self.cache.release()

    @torch.inference_mode()
    def submit(self, slices: Sequence[SequenceSlice]) -> None:
        self.cache.reach(max(piece.block_ids[-1] for piece in slices))
        if not self._samples:
            self.logits(slices)
            self._finished.append([])
            return
        sampling = [piece for piece in slices if piece.samples]
        rows = [(piece.sequence_id, state) for piece in sampling for state in self._states_of(piece)]
        scored, drawn = self._draw(slices, [state for _, state in rows])
        sampled = [
            SampledToken(sequence_id, item.token, item.logprobs, item.error, self._embedding(sequence_id))
            for (sequence_id, _), item in zip(rows, drawn, strict=True)
        ]
        self._finished.append(merged(slices, scored, sampled) if scored else sampled)
        first = 0
        for piece in sampling:
            if piece.num_drafts:
                self._learn(piece, sampled[first : first + 1 + piece.num_drafts])
            first += 1 + piece.num_drafts

    def _draw(
        self, slices: Sequence[SequenceSlice], states: list[SamplingState]
    ) -> tuple[list[SampledToken], list[Drawn]]:
        """The targets of all slices, and what is sampled for `states`."""
        inputs, hidden = self._inputs(slices)
        if all(state.is_plain for state in states) and not any(piece.targets for piece in slices):
            tokens = self._forward.greedy(inputs, hidden)
            if tokens is not None:
                self._pool(slices, hidden)
                return [], drawn_greedily(tokens.tolist(), states)
        logits = self._forward(inputs, hidden)
        self._pool(slices, hidden)
        scored, logits = self._scored(slices, logits)
        return scored, sample(logits, states, self._constraints, self._forward.kernels) if states else []

    def _scored(self, slices: Sequence[SequenceSlice], logits: Tensor) -> tuple[list[SampledToken], Tensor]:
        """The targets of all slices, and the rows that are sampled from."""
        if not any(piece.targets for piece in slices):
            return [], logits
        targets = targets_of(slices, lambda sequence_id: self._states[sequence_id].params)
        is_scored = np.concatenate([np.arange(piece.num_rows) < len(piece.targets) for piece in slices])
        chosen = torch.from_numpy(is_scored).to(logits.device)
        parts = score(logits[chosen], torch.from_numpy(targets.tokens).to(logits.device), targets.most)
        return targets.items(parts), logits[~chosen]

    def _embedding(self, sequence_id: SequenceId) -> bytes | None:
        pooling = self._pooling
        return packed(pooling.embedding(sequence_id)) if pooling is not None and sequence_id in pooling else None

    def _states_of(self, piece: SequenceSlice) -> list[SamplingState]:
        """One for each row that is sampled. Behind a draft that of a sequence that has got it, for the time being."""
        state = self._states[piece.sequence_id]
        if not piece.num_drafts:
            return [state]
        drafts = _tokens_of(piece)[-piece.num_drafts :]
        return [state.after(drafts[:count]) for count in range(len(drafts) + 1)]

    def _learn(self, piece: SequenceSlice, sampled: list[SampledToken]) -> None:
        """The loop keeps tokens up to the first that is not the draft in its place."""
        state = self._states[piece.sequence_id]
        drafts = _tokens_of(piece)[-piece.num_drafts :]
        for position, item in enumerate(sampled):
            if item.error is not None:
                return
            state.record(item.token)
            if position < len(drafts) and item.token != drafts[position]:
                return

    def collect(self) -> list[SampledToken]:
        return self._finished.pop(0)

    @torch.inference_mode()
    def logits(self, slices: Sequence[SequenceSlice]) -> Tensor:
        """Computes an iteration up to the logits [slices that sample, vocab_size], in slice order."""
        inputs, hidden = self._inputs(slices)
        logits = self._forward(inputs, hidden)
        self._pool(slices, hidden)
        return logits

    def _inputs(self, slices: Sequence[SequenceSlice]) -> tuple[Inputs, Tensor | None]:
        """With room for the hidden states that are wanted, if any are."""
        cache, pooling = self.cache, self._pooling
        inputs = build_inputs(
            slices,
            block_size=cache.block_size,
            num_kv_heads=cache.num_kv_heads,
            null_block=cache.null_block,
            gathered_positions=self._forward.gathered_positions,
            device=self._device,
            adapters=None if self.adapters is None else self.adapters.slots(slices),
            pooled=None if pooling is None else pooling.wanted(slices),
        )
        if pooling is None or inputs.hidden_rows is None:
            return inputs, None
        shape = (inputs.hidden_rows.shape[0], pooling.hidden_size)
        return inputs, torch.empty(shape, dtype=torch.float32, device=self._device)

    def _pool(self, slices: Sequence[SequenceSlice], hidden: Tensor | None) -> None:
        if self._pooling is not None and hidden is not None:
            self._pooling.take(slices, hidden)


def _tokens_of(piece: SequenceSlice) -> Sequence[int]:
    assert piece.token_ids is not None, piece.sequence_id
    return piece.token_ids
