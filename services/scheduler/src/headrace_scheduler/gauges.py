"""Figures of the core, for whoever looks at it. Pure."""

from collections.abc import Mapping

from headrace_scheduler.admission import Admitter
from headrace_scheduler.decisions import Gauges
from headrace_scheduler.ledger import WorkerLedger
from headrace_scheduler.registry import Registry
from headrace_shared.messages import WorkerId


def gauges_of(
    registry: Registry,
    workers: Mapping[WorkerId, WorkerLedger],
    admitter: Admitter,
    num_preemptions: int,
    num_losses: int,
) -> Gauges:
    """Linear in the number of running sequences."""
    return Gauges(
        num_requests=len(registry.requests),
        num_waiting=registry.num_unplaced,
        num_running=sum(len(ledger.running) for ledger in workers.values()),
        num_preemptions=num_preemptions,
        num_losses=num_losses,
        num_trials=sum(ledger.trial is not None for ledger in workers.values()),
        num_moved=admitter.num_moved,
        num_admissions=admitter.num_admissions,
        num_known_tokens=admitter.num_known_tokens,
        num_cached_tokens=admitter.num_cached_tokens,
        workers={worker_id: ledger.gauges() for worker_id, ledger in workers.items()},
    )
