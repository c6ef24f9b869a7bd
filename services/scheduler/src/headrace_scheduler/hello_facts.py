"""What a worker's Hello means to the core."""

from headrace_scheduler.decisions import LossCause, WorkerFacts
from headrace_scheduler.scheduler import Scheduler
from headrace_shared.errors import ProtocolError
from headrace_shared.fleet_messages import Hello, WorkerState

MAX_EPOCH = 1 << 48
"""Nobody gets there by taking leases: a worker that claims to obey a higher one is not believed."""
MAX_BLOCKS = 1 << 24
"""Of a worker: some hundred million tokens. Each costs its scheduler some bytes, whether or not it exists."""


def plausible(hello: Hello) -> Hello:
    """Raises ProtocolError for figures that no worker has that works."""
    sizes = (hello.num_blocks, hello.block_size, hello.context, hello.max_sequences, hello.tokens_per_iteration)
    is_working = hello.state in (WorkerState.READY, WorkerState.DRAINING)
    if hello.num_blocks > MAX_BLOCKS or (is_working and min(sizes) <= 0):
        raise ProtocolError(f"{hello.worker} has blocks, a context and places of {sizes}")
    return hello


def facts_of(hello: Hello) -> WorkerFacts:
    return WorkerFacts(
        hello.num_blocks, hello.block_size, hello.context, hello.max_sequences, hello.tokens_per_iteration
    )


def apply_hello(core: Scheduler, hello: Hello, now: float, *, accepting: bool) -> bool:
    """Whether a pass of the core is due by it. No-op for a worker that the core does not have."""
    core.set_accepting(hello.worker, accepting)
    digests = tuple(adapter.digest for adapter in hello.adapters if adapter.digest and not adapter.problem)
    known = core.adapters_of(hello.worker)
    if known is None or known == digests:
        return core.is_overdue(now)
    core.set_adapters(hello.worker, digests)
    return True


def departure(hello: Hello) -> tuple[str, LossCause] | None:
    """Why the worker has nothing any more of what it had; None if it may have."""
    match hello.state:
        case WorkerState.LEAVING:
            return hello.failure or "it leaves", LossCause.FAILED if hello.failure else LossCause.HANDED_OVER
        case WorkerState.PARKED:
            return "it is parked", LossCause.HANDED_OVER
        case WorkerState.LOADING:  # under its former name, before anybody could miss it
            return "it has started anew", LossCause.VANISHED
    return None


def least_epoch(hello: Hello) -> int:
    """Of a lease that the worker will obey. What is stored is as high, unless the broker has lost its leases."""
    return hello.epoch + 1 if 0 <= hello.epoch < MAX_EPOCH else 1
