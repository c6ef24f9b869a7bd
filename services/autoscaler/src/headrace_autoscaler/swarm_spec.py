"""How a Swarm service is scaled: its own specification with another number of replicas. Pure.

The driver sends it, and the proxy in front of the engine computes it again and accepts no other. Labels of a service,
unlike those of its tasks, change without touching a task: they keep which start was the last, so that none counts
twice.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from headrace_autoscaler.containers import GENERATION, MODEL, ROLE, WORKER, WORKER_ROLE
from headrace_shared.model_cards import served_name

STACK = "com.docker.stack.namespace"


class Scaling(NamedTuple):
    replicas: int
    generation: int
    worker: str
    """The start that asked for it, or the one before if it was a stop."""


class WorkerService(NamedTuple):
    id: str
    version: int
    model: str
    spec: Mapping[str, Any]


def read_service(found: Mapping[str, Any], stack: str) -> WorkerService | None:
    """From an item of what `GET /services` answers; None if it is not a worker service of the stack. Raises KeyError or
    TypeError if it is something else."""
    spec = found["Spec"]
    if not is_worker_service(spec, stack):
        return None
    return WorkerService(found["ID"], int(found["Version"]["Index"]), model_of(spec), spec)


def is_worker_service(spec: Mapping[str, Any], stack: str) -> bool:
    labels = spec.get("Labels") or {}
    return labels.get(STACK) == stack and labels.get(ROLE) == WORKER_ROLE and replicas_of(spec) is not None


def replicas_of(spec: Mapping[str, Any]) -> int | None:
    """None if its number is not ours to choose (a service on every node)."""
    replicas = ((spec.get("Mode") or {}).get("Replicated") or {}).get("Replicas")
    return replicas if isinstance(replicas, int) else None


def model_of(spec: Mapping[str, Any]) -> str:
    labels = spec.get("Labels") or {}
    items = spec["TaskTemplate"]["ContainerSpec"].get("Env") or ()
    env = dict(item.partition("=")[::2] for item in items)
    return labels.get(MODEL) or env.get("HEADRACE_SERVED_NAME") or served_name(env.get("HEADRACE_MODEL", ""))


def scaled(spec: Mapping[str, Any], scaling: Scaling) -> dict[str, Any]:
    labels = {**(spec.get("Labels") or {}), GENERATION: str(scaling.generation), WORKER: scaling.worker}
    return {**spec, "Labels": labels, "Mode": {"Replicated": {"Replicas": scaling.replicas}}}


def scaling_of(spec: Mapping[str, Any]) -> Scaling:
    """What the labels and the mode say was asked last."""
    labels = spec.get("Labels") or {}
    text = labels.get(GENERATION, "")
    generation = int(text) if text.isascii() and text.isdigit() else 0
    return Scaling(replicas_of(spec) or 0, generation, labels.get(WORKER, ""))
