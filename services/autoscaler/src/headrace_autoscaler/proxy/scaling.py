"""How a service may be updated: another number of replicas, within a limit, and nothing else. Pure."""

from collections.abc import Mapping
from typing import Any

from headrace_autoscaler.containers import GENERATION, WORKER, WORKER_NAME
from headrace_autoscaler.proxy.creation import GENERATION_NUMBER, check_generation, difference
from headrace_autoscaler.proxy.routes import Refused
from headrace_autoscaler.swarm_spec import Scaling, is_worker_service, replicas_of, scaled, scaling_of


def checked_scaling(stack: str, current: Mapping[str, Any], max_replicas: int, given: Any) -> dict[str, Any]:
    """The specification to store: what `given` asks for, in our own words. `current` is the service's. Raises
    Refused."""
    if not is_worker_service(current, stack):
        raise Refused("this is no worker service of this stack")
    labels = given.get("Labels") if isinstance(given, Mapping) else None
    replicas = replicas_of(given) if isinstance(given, Mapping) and isinstance(given.get("Mode"), Mapping) else None
    if replicas is None or isinstance(replicas, bool) or not 0 <= replicas <= max_replicas:
        raise Refused(f"Mode.Replicated.Replicas: a number up to {max_replicas} is wanted")
    if not isinstance(labels, Mapping):
        raise Refused("Labels: an object is wanted")
    worker, generation = labels.get(WORKER), labels.get(GENERATION)
    if not isinstance(worker, str) or (worker and WORKER_NAME.fullmatch(worker) is None):
        raise Refused(f"Labels.{WORKER} is missing or malformed")
    if not isinstance(generation, str) or GENERATION_NUMBER.fullmatch(generation) is None:
        raise Refused(f"Labels.{GENERATION} is missing or malformed")
    check_generation(int(generation), scaling_of(current).generation)
    expected = scaled(current, Scaling(replicas, int(generation), worker))
    where = difference(expected, given)
    if where is not None:
        raise Refused(f"{where or 'the body'} differs from the service as it is")
    return expected
