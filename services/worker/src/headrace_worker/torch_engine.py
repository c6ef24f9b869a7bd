"""The torch engine: weights, cache and sampling of one model on one device. See `iteration.Engine` for its contract."""

from collections.abc import Sequence

import torch
from torch import Tensor

from headrace_shared.messages import Admission, ModelCard, SequenceId
from headrace_worker.forward import Forward
from headrace_worker.inputs import build_inputs
from headrace_worker.iteration import EngineFacts, SampledToken, SequenceSlice
from headrace_worker.kv_cache import KVCache
from headrace_worker.sampling import SamplingState, sample


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
    ) -> None:
        """`samples`: `forward` returns logits that are sampled from here; else that is another rank's business."""
        self.cache = cache
        self._forward = forward
        self._device = device
        self._samples = samples
        self._states: dict[SequenceId, SamplingState] = {}
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
        )

    @property
    def facts(self) -> EngineFacts:
        return self._facts

    @property
    def looks_ahead(self) -> bool:
        return False

    def add(self, admission: Admission) -> None:
        if self._samples:
            self._states[admission.sequence_id] = SamplingState(admission, self._facts.card.vocab_size)
        with torch.inference_mode():
            self.cache.copy_blocks(admission.copies)
            offset = admission.num_cached % self.cache.block_size
            if offset:
                # What follows the shared part was the source's own.
                self.cache.clear_after(admission.block_ids[admission.num_cached // self.cache.block_size], offset)

    def remove(self, sequence_id: SequenceId) -> None:
        self._states.pop(sequence_id, None)

    @torch.inference_mode()
    def submit(self, slices: Sequence[SequenceSlice]) -> None:
        sampled = [piece.sequence_id for piece in slices if piece.samples and self._samples]
        logits = self.logits(slices)
        drawn = sample(logits, [self._states[sequence_id] for sequence_id in sampled]) if sampled else []
        self._finished.append(
            [
                SampledToken(sequence_id, item.token, item.logprobs, item.error)
                for sequence_id, item in zip(sampled, drawn, strict=True)
            ]
        )

    def collect(self) -> list[SampledToken]:
        return self._finished.pop(0)

    @torch.inference_mode()
    def logits(self, slices: Sequence[SequenceSlice]) -> Tensor:
        """Computes an iteration up to the logits [slices that sample, vocab_size], in slice order."""
        cache = self.cache
        inputs = build_inputs(
            slices,
            block_size=cache.block_size,
            num_kv_heads=cache.num_kv_heads,
            null_block=cache.null_block,
            gathered_positions=self._forward.gathered_positions,
            device=self._device,
        )
        return self._forward(inputs)
