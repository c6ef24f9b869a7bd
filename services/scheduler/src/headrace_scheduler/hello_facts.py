"""What a worker's Hello means to the core."""

from headrace_scheduler.scheduler import Scheduler
from headrace_shared.fleet_messages import Hello


def apply_hello(core: Scheduler, hello: Hello, now: float, *, accepting: bool) -> bool:
    """Whether a pass of the core is due by it. No-op for a worker that the core does not have."""
    core.set_accepting(hello.worker, accepting)
    digests = tuple(adapter.digest for adapter in hello.adapters if adapter.digest and not adapter.problem)
    known = core.adapters_of(hello.worker)
    if known is None or known == digests:
        return core.is_overdue(now)
    core.set_adapters(hello.worker, digests)
    return True
