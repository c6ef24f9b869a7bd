from typing import Any

from headrace_autoscaler.driver import InstanceState
from headrace_autoscaler.swarm_spec import read_service
from headrace_autoscaler.swarm_tasks import read_tasks


def service(replicas: int) -> Any:
    spec = {
        "Name": "headrace_worker",
        "Labels": {"com.docker.stack.namespace": "headrace", "com.headrace.role": "worker"},
        "TaskTemplate": {"ContainerSpec": {"Env": ["HEADRACE_MODEL=smollm2-135m"]}},
        "Mode": {"Replicated": {"Replicas": replicas}},
    }
    return read_service({"ID": "svc1", "Version": {"Index": 3}, "Spec": spec}, "headrace")


def task(name: str, state: str, desired: str = "running", at: str = "2026-11-29T10:00:00Z", of: str = "svc1") -> Any:
    status = {"State": state, "Timestamp": at, "ContainerStatus": {"ExitCode": 0}}
    return {"ID": name, "ServiceID": of, "DesiredState": desired, "Status": status}


def states(replicas: int, *tasks: Any) -> dict[str, InstanceState]:
    return {view.instance.key: view.instance.state for view in read_tasks(service(replicas), tasks)}


def test_workers_are_named_after_their_tasks() -> None:
    [view] = read_tasks(service(1), [task("abc", "running")])
    assert (view.instance.worker, view.instance.model, view.instance.started_at) == (
        "worker-abc",
        "smollm2-135m",
        1795946400.0,
    )
    assert view.instance.is_managed


def test_states_are_those_of_the_driver() -> None:
    found = states(
        4, task("a", "running"), task("b", "preparing"), task("c", "running", "shutdown"), task("d", "pending")
    )
    assert found == {"a": InstanceState.RUNNING, "b": InstanceState.CREATED, "d": InstanceState.CREATED}, (
        "what Swarm stops already is its own business"
    )


def test_an_ended_task_counts_until_its_replica_is_taken_away() -> None:
    tasks = [
        task("a", "running"),
        task("b", "complete", "shutdown"),
        task("c", "complete", "shutdown", "2026-11-28T10:00:00Z"),
    ]
    assert states(2, *tasks) == {"a": InstanceState.RUNNING, "b": InstanceState.EXITED}, "the newest"
    assert states(1, *tasks) == {"a": InstanceState.RUNNING}


def test_tasks_of_other_services_are_left_out() -> None:
    assert states(1, task("a", "running", of="other")) == {}


def test_a_service_on_every_node_has_no_number_to_choose() -> None:
    spec = {"Labels": {"com.docker.stack.namespace": "headrace", "com.headrace.role": "worker"}, "Mode": {"Global": {}}}
    assert read_service({"ID": "x", "Version": {"Index": 1}, "Spec": spec}, "headrace") is None
