"""Whether the structures of the core agree with each other."""

from collections.abc import Mapping

from headrace_scheduler.ledger import WorkerLedger
from headrace_scheduler.registry import Registry
from headrace_scheduler.sequence import SequenceState
from headrace_shared.messages import WorkerId


def check_integrity(registry: Registry, workers: Mapping[WorkerId, WorkerLedger], next_sequence_id: int) -> None:
    """Raises AssertionError, with the values, if any structure disagrees with another (I1)."""
    registry.check_integrity()
    for worker_id, ledger in workers.items():
        ledger.check_integrity()
        for stay in ledger.stays.values():
            assert stay.ledger is ledger, (worker_id, stay.sequence_id)
            assert stay.sequence_id < next_sequence_id, stay.sequence_id
            if stay.sequence is not None:
                request = stay.sequence.request
                assert registry.requests.get(request.request.request_id) is request, stay.sequence_id
    num_running = sum(len(ledger.running) for ledger in workers.values())
    num_states = sum(len(r.in_state(SequenceState.RUNNING)) for r in registry.requests.values())
    assert num_running == num_states, (num_running, num_states)
