"""Where each worker stands: what its engine shows of it and what it says itself, put together. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import NamedTuple

from headrace_autoscaler.driver import Instance, InstanceState
from headrace_shared.fleet_messages import WorkerState
from headrace_shared.messages import WorkerId

SILENT_AFTER_S = 5.0
"""A worker that has said nothing for so long takes no requests."""


class Heard(NamedTuple):
    """What a worker last said."""

    state: WorkerState
    silent_for_s: float
    is_parking: bool = False
    num_running: int = 0
    """Sequences."""
    command_epoch: int = 0
    """Highest epoch of an autoscaler that it has obeyed."""
    failure: str = ""


class Phase(Enum):
    READY = "ready"
    COMING = "coming"
    """On its way to being ready: started, loading, or silent for a moment."""
    PARKED = "parked"
    PARKING = "parking"
    """On its way to being parked."""
    LEAVING = "leaving"
    EXITED = "exited"
    CREATED = "created"
    """Its start was cut off."""


class Standing(NamedTuple):
    worker: WorkerId
    """Empty: not known yet."""
    phase: Phase
    instance: Instance | None
    """None: nobody manages it, or its engine does not show it yet."""
    heard: Heard | None

    @property
    def is_managed(self) -> bool:
        return self.instance is not None and self.instance.is_managed

    @property
    def is_silent(self) -> bool:
        """It has spoken, but not lately."""
        return self.heard is not None and self.heard.silent_for_s > SILENT_AFTER_S


_SAID = {
    WorkerState.LOADING: Phase.COMING,
    WorkerState.READY: Phase.READY,
    WorkerState.DRAINING: Phase.LEAVING,
    WorkerState.PARKED: Phase.PARKED,
    WorkerState.LEAVING: Phase.LEAVING,
}


def standings(instances: Iterable[Instance], heard: Mapping[WorkerId, Heard]) -> list[Standing]:
    """Of one model. Workers known only from what they say are somebody else's; of those, the silent are gone."""
    rest = dict(heard)
    found = []
    unnamed = []
    for instance in instances:
        if instance.worker or instance.is_managed:
            said = rest.pop(instance.worker, None)
            found.append(Standing(instance.worker, _phase(instance, said), instance, said))
        elif instance.state is InstanceState.RUNNING:
            unnamed.append(instance)
    others = [_of_others(worker, said) for worker, said in rest.items() if said.silent_for_s <= SILENT_AFTER_S]
    # Those of the operator have names of their own choosing: who is not heard of yet is on its way.
    num_unheard = max(0, len(unnamed) - len(others))
    return [*found, *others, *[Standing(WorkerId(""), Phase.COMING, each, None) for each in unnamed[:num_unheard]]]


def in_phase(standings: Sequence[Standing], *phases: Phase) -> list[Standing]:
    return [standing for standing in standings if standing.phase in phases]


def _of_others(worker: WorkerId, said: Heard) -> Standing:
    return Standing(worker, _said_phase(said), None, said)


def _phase(instance: Instance, said: Heard | None) -> Phase:
    if instance.state is InstanceState.EXITED:
        return Phase.EXITED
    if instance.state is InstanceState.STOPPING:
        return Phase.LEAVING
    if instance.state is InstanceState.CREATED:
        return Phase.CREATED if instance.worker else Phase.COMING
    if said is None:
        return Phase.COMING
    phase = _said_phase(said)
    return Phase.COMING if phase is Phase.READY and said.silent_for_s > SILENT_AFTER_S else phase


def _said_phase(said: Heard) -> Phase:
    if said.is_parking and said.state in (WorkerState.LOADING, WorkerState.DRAINING):
        return Phase.PARKING
    return _SAID[said.state]
