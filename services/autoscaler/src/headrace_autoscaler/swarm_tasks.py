"""The tasks of a Swarm service that count. Pure.

Swarm keeps a history: a task that has ended stays listed for long. It counts only as long as the number of replicas has
not been lowered for it.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from headrace_autoscaler.containers import unix_seconds
from headrace_autoscaler.driver import Instance, InstanceState
from headrace_autoscaler.swarm_spec import WorkerService, replicas_of
from headrace_shared.messages import WorkerId

_ENDED = ("complete", "failed", "rejected", "shutdown", "orphaned", "remove")
_WANTED = ("running", "ready", "accepted")


class TaskView(NamedTuple):
    instance: Instance
    is_runnable: bool


def worker_of(task_id: str) -> WorkerId:
    """As the stack file has it: HEADRACE_SERVICE_ID is worker-{{.Task.ID}}."""
    return WorkerId(f"worker-{task_id}")


def read_tasks(service: WorkerService, tasks: Sequence[Mapping[str, Any]]) -> list[TaskView]:
    """Those that run or will, and the newest of the ended ones for which there still is a replica. Raises KeyError or
    TypeError if `tasks` are something else."""
    own = [task for task in tasks if task["ServiceID"] == service.id]
    views = [_view(task, service.model) for task in sorted(own, key=_last_change, reverse=True)]
    runnable = [view for view in views if view.is_runnable]
    ended = [view for view in views if view.instance.state is InstanceState.EXITED]
    missing = max(0, (replicas_of(service.spec) or 0) - len(runnable))
    return [*runnable, *ended[:missing]]


def _last_change(task: Mapping[str, Any]) -> str:
    return str(task["Status"].get("Timestamp", ""))


def _view(task: Mapping[str, Any], model: str) -> TaskView:
    status = task["Status"]
    state, is_wanted = status["State"], task["DesiredState"] in _WANTED
    has_ended = state in _ENDED
    code = (status.get("ContainerStatus") or {}).get("ExitCode")
    instance = Instance(
        key=task["ID"],
        worker=worker_of(task["ID"]),
        model=model,
        state=_state(state, has_ended, is_wanted),
        started_at=unix_seconds(status.get("Timestamp", "")) if state == "running" else 0.0,
        exit_code=code if has_ended else None,
        is_managed=True,
    )
    return TaskView(instance, is_wanted and not has_ended)


def _state(state: str, has_ended: bool, is_wanted: bool) -> InstanceState:
    if has_ended:
        return InstanceState.EXITED
    if not is_wanted:
        return InstanceState.STOPPING
    return InstanceState.RUNNING if state == "running" else InstanceState.CREATED
