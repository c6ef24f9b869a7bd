"""What may be created: a clone of one of the project's own workers, and exactly that. Pure."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from headrace_autoscaler.container_spec import Clone, Unclonable, clone_body
from headrace_autoscaler.containers import (
    GENERATION,
    GPUS,
    HOLDING,
    MODEL,
    NUMBER,
    PARKED,
    WORKER,
    WORKER_NAME,
    WorkerContainer,
    container_name,
    template_of,
)
from headrace_autoscaler.gpu_inventory import GPU_ID
from headrace_autoscaler.proxy.routes import Refused
from headrace_shared.messages import WorkerId

MAX_GPUS = 64
_NUMBER = re.compile(r"[1-9][0-9]{0,5}")
GENERATION_NUMBER = re.compile(r"0|[1-9][0-9]{0,17}")
_MAX_MODEL_CHARS = 256


def checked_body(
    project: str, containers: Sequence[WorkerContainer], max_managed: int, name: str, clone: Clone, given: Any
) -> dict[str, Any]:
    """The body to create: what `given` asks for, in our own words. `containers` are all workers of the project.
    Raises Refused, with the place of the first difference from what would be allowed."""
    if name != container_name(project, clone.worker):
        raise Refused(f"name: {container_name(project, clone.worker)} is wanted")
    managed = [container for container in containers if container.is_managed]
    if len(managed) >= max_managed:
        raise Refused(f"there are {len(managed)} managed containers; {max_managed} are allowed")
    check_generation(clone.generation, max((container.generation for container in managed), default=0))
    template = template_of(containers, clone.model)
    if template is None:
        raise Refused(f"no worker of this project serves {clone.model}")
    try:
        expected = clone_body(template, clone)
    except Unclonable as error:
        raise Refused(str(error)) from error
    _check_gpus(containers, clone)
    where = difference(expected, given)
    if where is not None:
        raise Refused(f"{where or 'the body'} differs from the worker service of this project")
    return expected


def check_generation(generation: int, newest: int) -> None:
    """An autoscaler that has lost its leadership must not act any more. Raises Refused."""
    if generation < newest:
        raise Refused(f"generation {generation} is over, {newest} has begun", 412)


def read_clone(given: Any) -> Clone:
    """What a body claims to be, by its labels. Raises Refused."""
    labels = given.get("Labels") if isinstance(given, Mapping) else None
    if not isinstance(labels, Mapping) or not all(isinstance(value, str) for value in labels.values()):
        raise Refused("Labels: an object of texts is wanted")
    worker, model = labels.get(WORKER, ""), labels.get(MODEL, "")
    generation, number = labels.get(GENERATION, ""), labels.get(NUMBER, "")
    if WORKER_NAME.fullmatch(worker) is None:
        raise Refused(f"Labels.{WORKER} is missing or malformed")
    if not 0 < len(model) <= _MAX_MODEL_CHARS:
        raise Refused(f"Labels.{MODEL} is missing or malformed")
    if GENERATION_NUMBER.fullmatch(generation) is None:
        raise Refused(f"Labels.{GENERATION} is missing or malformed")
    if _NUMBER.fullmatch(number) is None:
        raise Refused(f"Labels.{NUMBER} is missing or malformed")
    gpus = tuple(labels[GPUS].split(",")) if GPUS in labels else ()
    if len(gpus) > MAX_GPUS or len(set(gpus)) < len(gpus) or not all(GPU_ID.fullmatch(gpu) for gpu in gpus):
        raise Refused(f"Labels.{GPUS} is malformed")
    return Clone(WorkerId(worker), model, int(generation), int(number), gpus, PARKED in labels)


def difference(expected: Any, given: Any, where: str = "") -> str | None:
    """The path of the first place at which two JSON values differ; None if they are the same. Names and not values:
    an environment may hold secrets."""
    if type(expected) is not type(given):
        return where
    if isinstance(expected, dict):
        for key in [*expected, *(key for key in given if key not in expected)]:
            place = f"{where}.{key[:64]}" if where else key[:64]
            if key not in expected or key not in given:
                return place
            found = difference(expected[key], given[key], place)
            if found is not None:
                return found
        return None
    if isinstance(expected, list):
        if len(expected) != len(given):
            return where
        pairs = enumerate(zip(expected, given, strict=True))
        found_at = (difference(one, other, f"{where}[{position}]") for position, (one, other) in pairs)
        return next((found for found in found_at if found is not None), None)
    return None if expected == given else where


def _check_gpus(containers: Sequence[WorkerContainer], clone: Clone) -> None:
    """The driver knows which GPUs there are; here it is enough that no id is given out twice."""
    for container in containers:
        held = {gpu for request in container.device_requests for gpu in request.get("DeviceIDs") or ()}
        if container.status in HOLDING and not held.isdisjoint(clone.gpus):
            raise Refused(f"{container.name} has one of these GPUs", 409)
