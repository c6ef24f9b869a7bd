"""What of a model's workers is broken or left over, and what that says about starting others. Pure."""

from collections.abc import Sequence
from typing import NamedTuple

from headrace_autoscaler.actions import Remove
from headrace_autoscaler.failures import PROOF_S, Failures
from headrace_autoscaler.ledger import PROMOTION_S, Ledger
from headrace_autoscaler.standing import Phase, Standing
from headrace_shared.fleet_messages import CommandKind

SILENCE_S = 30.0
"""A worker that runs and has said nothing for so long hangs, if the others are heard."""
HELLO_S = 180.0
"""The same for one that has never said anything."""
HUNG_GRACE_S = 5.0
"""Whoever does not speak will hardly obey, and holds a place and a GPU."""
EXIT_CONFIG = 2
"""Exit code of a worker whose settings cannot be served: no other one will fare better."""


class Bounds(NamedTuple):
    """Times of the shell's settings."""

    stop_grace_s: float = 30.0
    """Between SIGTERM and SIGKILL."""
    drain_limit_s: float = 660.0
    """A worker that was told to drain is stopped after this, whatever it still does."""


def repair(
    ledger: Ledger,
    failures: Failures,
    standings: Sequence[Standing],
    now: float,
    *,
    heard_for_s: float,
    bounds: Bounds,
) -> tuple[list[Remove], Failures]:
    """`heard_for_s`: how long whatever the workers say has been heard without a gap."""
    actions = []
    for each in standings:
        if not each.is_managed or each.instance is None:
            continue
        ready_for_s = ledger.ready_for_s(each.worker, now)
        if each.phase is Phase.READY and ready_for_s is not None and now - ready_for_s > failures.at:
            failures = failures.proved() if ready_for_s >= PROOF_S else failures
        elif each.phase is Phase.EXITED:
            if ledger.begin_end(each):
                failures = _account(ledger, failures, each, now)
            actions.append(Remove(each.instance, 0.0, "it has ended"))
        elif (problem := _problem(ledger, each, now, heard_for_s)) is not None:
            if ledger.begin_end(each):
                failures = failures.failed(f"{each.worker}: {problem}", now)
            actions.append(Remove(each.instance, min(bounds.stop_grace_s, HUNG_GRACE_S), problem))
        elif each.phase in (Phase.LEAVING, Phase.PARKING) and _is_overdue(ledger, each, now, bounds):
            ledger.begin_end(each)
            actions.append(Remove(each.instance, bounds.stop_grace_s, "its time to drain is up"))
    return actions, failures


def _account(ledger: Ledger, failures: Failures, standing: Standing, now: float) -> Failures:
    """An end that was asked for, or after a long life, speaks against nobody."""
    assert standing.instance is not None
    code = standing.instance.exit_code
    ready_for_s = ledger.ready_for_s(standing.worker, now)
    has_lived = ready_for_s is not None and ready_for_s >= PROOF_S
    if code == 0 or has_lived or ledger.was_told(standing.worker, CommandKind.DRAIN):
        return failures
    said = standing.heard.failure if standing.heard is not None else ""
    what = f"{standing.worker} ended with exit code {code}" + (f": {said}" if said else "")
    return failures.failed(what, now, is_hopeless=code == EXIT_CONFIG, was_ready=ready_for_s is not None)


def _problem(ledger: Ledger, standing: Standing, now: float, heard_for_s: float) -> str | None:
    if standing.phase not in (Phase.COMING, Phase.PARKED, Phase.PARKING) or not standing.worker:
        return None
    if standing.heard is None:
        is_lost = min(ledger.age_s(standing, now), heard_for_s) > HELLO_S
        return f"it has said nothing in {HELLO_S:.0f} s" if is_lost else None
    if min(standing.heard.silent_for_s, heard_for_s) > SILENCE_S:
        return f"it has been silent for {SILENCE_S:.0f} s"
    is_promoted = ledger.was_told(standing.worker, CommandKind.PROMOTE)
    if standing.phase is Phase.PARKED and is_promoted and ledger.told_for_s(standing.worker, now) > PROMOTION_S:
        return f"it was not ready {PROMOTION_S:.0f} s after its promotion"
    return None


def _is_overdue(ledger: Ledger, standing: Standing, now: float, bounds: Bounds) -> bool:
    was_told = any(ledger.was_told(standing.worker, kind) for kind in (CommandKind.DRAIN, CommandKind.PARK))
    return was_told and ledger.leaving_for_s(standing.worker, now) > bounds.drain_limit_s
