"""Notes when each sequence on the worker was admitted, first computed, had its first token and was over.

In the I/O process, from what the engine reports of each iteration anyway: the engine knows nothing of it.
"""

from collections.abc import Callable, Iterable

from headrace_shared.messages import Admission, SequenceId
from headrace_shared.tracing import Value
from headrace_worker.engine_frames import Iteration
from headrace_worker.stay_metrics import StayMetrics
from headrace_worker.stay_traces import StayTraces


class _Stay:
    __slots__ = ("admission", "admitted_at", "first_token_at", "started_at")

    def __init__(self, admission: Admission, now: float) -> None:
        self.admission = admission
        self.admitted_at = now
        self.started_at: float | None = None
        self.first_token_at: float | None = None


class StayWatch:
    def __init__(
        self, metrics: StayMetrics, traces: StayTraces | None, num_tokens_of: Callable[[SequenceId], int]
    ) -> None:
        """`num_tokens_of`: that a sequence has sampled since its admission."""
        self._metrics = metrics
        self._traces = traces
        self._num_tokens_of = num_tokens_of
        self._prefilling: dict[SequenceId, _Stay] = {}
        self._decoding: dict[SequenceId, _Stay] = {}

    def admitted(self, admissions: Iterable[Admission], now: float) -> None:
        for admission in admissions:
            if admission.sequence_id not in self._decoding:
                self._prefilling.setdefault(admission.sequence_id, _Stay(admission, now))

    def on_iteration(self, iteration: Iteration, now: float) -> None:
        """`now`: monotonic, of its end. What is not known was dropped, or came before a restart of the numbering."""
        rows = iteration.rows
        if self._traces is not None and rows and self._traces.is_due(now):
            self._show(self._traces, iteration, now)
        prefilling = self._prefilling
        num_sampled = num_first = 0
        for row in rows:
            if row.token is not None:
                num_sampled += 1
            if prefilling:
                stay = prefilling.get(row.sequence_id)
                if stay is not None:
                    if stay.started_at is None:
                        stay.started_at = now - iteration.elapsed_s
                    if row.token is not None:
                        num_first += 1
                        stay.first_token_at = now
                        self._decoding[row.sequence_id] = prefilling.pop(row.sequence_id)
            if row.finish is not None:
                self._over(row.sequence_id, now, row.finish.value)
            elif row.error is not None:
                self._over(row.sequence_id, now, "failed")
        self._metrics.iteration(len(rows), iteration.num_prefill_tokens, num_sampled - num_first, iteration.elapsed_s)
        for sequence_id in iteration.released:
            self._over(sequence_id, now, "stopped")

    def clear(self) -> None:
        """Everything was dropped."""
        self._prefilling.clear()
        self._decoding.clear()

    def _over(self, sequence_id: SequenceId, now: float, ending: str) -> None:
        stay = self._decoding.pop(sequence_id, None) or self._prefilling.pop(sequence_id, None)
        if stay is None:
            return
        if ending not in ("stopped", "failed"):
            self._metrics.over(stay.started_at, stay.first_token_at, now)
        if self._traces is not None:
            self._traces.stay(
                stay.admission,
                (stay.admitted_at, stay.started_at, stay.first_token_at, now),
                self._num_tokens_of(sequence_id),
                ending,
                error=ending == "failed",
            )

    def _show(self, traces: StayTraces, iteration: Iteration, now: float) -> None:
        ids = {row.sequence_id for row in iteration.rows}
        stays = [stay for known in (self._prefilling, self._decoding) for key, stay in known.items() if key in ids]
        attributes: dict[str, Value] = {
            "headrace.iteration.number": iteration.num_iterations,
            "headrace.iteration.sequences": len(ids),
            "headrace.iteration.prefill_tokens": iteration.num_prefill_tokens,
        }
        traces.iteration(now, iteration.elapsed_s, attributes, [stay.admission for stay in stays])
