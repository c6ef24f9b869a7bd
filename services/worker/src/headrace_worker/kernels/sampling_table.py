"""What sampling must know of each sequence, on the device: one slot a sequence, changed there by every token drawn."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headrace_shared.codec import unpack_ids
from headrace_shared.messages import Admission
from headrace_worker.kernels.checks import require
from headrace_worker.penalties import penalizes
from headrace_worker.sampling import GREEDY_TEMPERATURE

INTEGERS = ("seed", "choice", "num_output", "top_k", "min_tokens", "num_stop_ids", "num_biases", "penalizes")
FLOATS = ("temperature", "top_p", "min_p", "repetition", "presence", "frequency")
MAX_STOP_IDS = 256
MAX_BIASES = 1024


class Need(NamedTuple):
    """What a batch asks of sampling: known on the host, so that what nobody asks for is not even launched."""

    draws: bool = False
    """Some sequence is not greedy."""
    filters: bool = False
    """Some sequence that draws has top-k or top-p."""
    num_logprobs: int | None = None
    """The most that any sequence wants; None: none wants any."""

    def __or__(self, other: "Need") -> "Need":
        numbers = [need.num_logprobs for need in (self, other) if need.num_logprobs is not None]
        return Need(self.draws or other.draws, self.filters or other.filters, max(numbers) if numbers else None)


class SamplingTable:
    """Tensors by slot. `counts` takes 4 bytes a token of the vocabulary and slot."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.integers = torch.zeros((num_slots, len(INTEGERS)), dtype=torch.int64, device=device)
        self.floats = torch.zeros((num_slots, len(FLOATS)), dtype=torch.float64, device=device)
        self.counts = torch.zeros((num_slots, vocab_size), dtype=torch.int32, device=device)
        """Twice the number of times in the output, and 1 more if it is in the prompt."""
        self.stop_ids = torch.zeros((num_slots, MAX_STOP_IDS), dtype=torch.int32, device=device)
        self.bias_ids = torch.zeros((num_slots, MAX_BIASES), dtype=torch.int32, device=device)
        self.biases = torch.zeros((num_slots, MAX_BIASES), dtype=torch.float32, device=device)

    @property
    def num_slots(self) -> int:
        return self.integers.shape[0]

    @property
    def device(self) -> torch.device:
        return self.integers.device

    def assign(self, slot: int, admission: Admission) -> Need:
        """Gives the slot to a sequence. Copies to the device, in the order of the current stream; waits for nothing.

        ValueError for more stop tokens or biases than a slot holds.
        """
        params, stop = admission.request.sampling, admission.request.stop
        bias = {token: value for token, value in params.logit_bias.items() if token < self.vocab_size}
        stop_ids = [token for token in stop.stop_token_ids if token < self.vocab_size]
        require(len(stop_ids) <= MAX_STOP_IDS, f"{len(stop_ids)} stop tokens, of which a slot holds {MAX_STOP_IDS}")
        require(len(bias) <= MAX_BIASES, f"{len(bias)} biases, of which a slot holds {MAX_BIASES}")
        output = np.asarray(unpack_ids(admission.output), dtype=np.int64)
        counts_tokens = penalizes(params)
        self._put(
            self.integers[slot],
            [
                params.seed,
                admission.choice,
                output.shape[0],
                params.top_k if params.top_k < self.vocab_size else 0,
                stop.min_tokens,
                len(stop_ids),
                len(bias),
                int(counts_tokens),
            ],
        )
        greedy = params.temperature <= GREEDY_TEMPERATURE
        self._put(
            self.floats[slot],
            [
                0.0 if greedy else params.temperature,
                params.top_p,
                params.min_p,
                params.repetition_penalty,
                params.presence_penalty,
                params.frequency_penalty,
            ],
        )
        if stop_ids:
            self._put(self.stop_ids[slot, : len(stop_ids)], stop_ids)
        if bias:
            self._put(self.bias_ids[slot, : len(bias)], list(bias))
            self._put(self.biases[slot, : len(bias)], list(bias.values()))
        if counts_tokens:
            # Only the repetition penalty looks at the prompt.
            prompt = unpack_ids(admission.request.prompt) if params.repetition_penalty != 1.0 else ()
            self._count(slot, np.asarray(prompt, dtype=np.int64), output)
        filters = not greedy and (0 < params.top_k < self.vocab_size or params.top_p < 1.0)
        return Need(not greedy, filters, params.num_logprobs)

    def _count(self, slot: int, prompt: np.ndarray, output: np.ndarray) -> None:
        counts = self.counts[slot].zero_()
        for ids, amount in ((np.unique(prompt), 1), (output, 2)):
            host = torch.from_numpy(ids[ids < self.vocab_size])
            known = (host.pin_memory() if counts.is_cuda else host).to(self.device, non_blocking=True)
            counts.index_add_(0, known, torch.full_like(known, amount, dtype=torch.int32))

    @staticmethod
    def _put(place: Tensor, values: list[int] | list[float]) -> None:
        host = torch.tensor(values, dtype=place.dtype)
        # From pinned memory the copy is queued; from other memory it would wait for the device.
        place.copy_(host.pin_memory() if place.is_cuda else host, non_blocking=True)
