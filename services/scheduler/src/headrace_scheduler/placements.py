"""What is told of each placement: how long the request has waited for it, to metrics and to its trace."""

from collections.abc import Callable

from headrace_scheduler.reporting import Reporting
from headrace_scheduler.request_traces import RequestTraces
from headrace_scheduler.scheduler import Scheduler
from headrace_shared.bus import Bus
from headrace_shared.messages import Admission, WorkerId


class Placements:
    def __init__(
        self, bus: Bus, reporting: Reporting, traces: RequestTraces | None, age_s: Callable[[float], float]
    ) -> None:
        """`age_s`: of a message that the broker has stamped so."""
        self._bus = bus
        self._reporting = reporting
        self._traces = traces
        self._age_s = age_s

    def on_admission(self, core: Scheduler, worker_id: WorkerId, admission: Admission, now: float) -> None:
        """To be called in the pass that admits it."""
        owned = core.request(admission.request.request_id)
        if owned is None:
            return
        sequence = owned.sequences[admission.choice]
        waited_s = max(0.0, now - sequence.waiting_since)
        is_first = not (admission.output or admission.num_losses or sequence.num_preemptions)
        if is_first and admission.choice == 0:
            published_at = self._bus.published_at(admission.ack_subject)
            age_s = self._age_s(published_at) if published_at is not None else 0.0
            self._reporting.placed(max(waited_s, age_s))
        if self._traces is not None:
            self._traces.placed(worker_id, admission, waited_s, sequence.num_preemptions)
