"""What one worker is and can do, from the roofline of the timing-model worker."""

from typing import NamedTuple

from headrace_scheduler.decisions import WorkerFacts
from headrace_scheduler.ledger import most_admitted
from headrace_worker.timing.roofline import Roofline, Work

FULL = 0.8
"""Share of the places in an iteration at which a worker counts as fully used: more only makes everybody slower."""


class WorkerKind(NamedTuple):
    roofline: Roofline
    facts: WorkerFacts

    @property
    def places(self) -> int:
        """Sequences that a scheduler admits."""
        return most_admitted(self.facts.max_sequences)

    @property
    def kv_tokens(self) -> int:
        return self.facts.num_blocks * self.facts.block_size

    def full_batch(self, mean_held: float) -> float:
        """Sequences that fully use a worker, if each holds so many tokens in the cache."""
        return min(FULL * self.facts.max_sequences, FULL * self.kv_tokens / max(1.0, mean_held))

    def capacity(self, mean_prompt: float, mean_answer: float) -> float:
        """Requests a second of that length that one fully used worker serves. Iterations with prompt in them decode as
        well; only what answers need beyond that takes iterations of its own."""
        running = self.full_batch(mean_prompt + mean_answer)
        held = int(running * (mean_prompt + mean_answer / 2))
        chunk = max(1.0, self.facts.tokens_per_iteration - running)
        decode_s = self.roofline.iteration_s(Work(int(running), held, held))
        mixed_s = self.roofline.iteration_s(Work(int(running + chunk), held + chunk * mean_prompt / 2, held))
        num_mixed, num_needed = mean_prompt / chunk, mean_answer / running
        return 1 / (num_mixed * mixed_s + max(0.0, num_needed - num_mixed) * decode_s)
