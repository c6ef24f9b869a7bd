"""What is to be done to a model's workers. Data only; each may be repeated."""

from typing import NamedTuple

from headrace_autoscaler.driver import Instance
from headrace_shared.fleet_messages import CommandKind
from headrace_shared.messages import WorkerId


class Start(NamedTuple):
    worker: WorkerId
    is_parked: bool = False


class Command(NamedTuple):
    """To a worker, over the bus."""

    worker: WorkerId
    kind: CommandKind


class Remove(NamedTuple):
    """Ends what still runs of it, and removes what is left."""

    instance: Instance
    grace_s: float
    reason: str


Action = Start | Command | Remove
