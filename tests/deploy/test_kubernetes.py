"""The example for Kubernetes holds together: what it names exists, and what is promised elsewhere fits in it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from headrace_router.settings import RouterSettings
from headrace_scheduler.settings import SchedulerSettings
from headrace_shared.common_settings import CommonSettings
from headrace_shared.service import STOP_TIMEOUT_S
from headrace_shared.settings import load_settings
from headrace_shared.subjects import requests_stream
from headrace_worker.settings import WorkerSettings
from tests.deploy.broker_files import check, lay_out

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"
KUSTOMIZATION = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
SETTINGS: dict[str, type[CommonSettings]] = {
    "router": RouterSettings,
    "scheduler": SchedulerSettings,
    "worker": WorkerSettings,
}
API_VERSIONS = {
    "ConfigMap": "v1",
    "Deployment": "apps/v1",
    "HorizontalPodAutoscaler": "autoscaling/v2",
    "NetworkPolicy": "networking.k8s.io/v1",
    "PodDisruptionBudget": "policy/v1",
    "ScaledObject": "keda.sh/v1alpha1",
    "Service": "v1",
    "StatefulSet": "apps/v1",
}


def documents(kind: str = "") -> Iterator[dict[str, Any]]:
    for name in KUSTOMIZATION["resources"]:
        for document in yaml.safe_load_all((FOLDER / name).read_text()):
            if kind in ("", document["kind"]):
                yield document


WORKLOADS = {found["metadata"]["name"]: found for kind in ("Deployment", "StatefulSet") for found in documents(kind)}
PODS = {name: workload["spec"]["template"] for name, workload in WORKLOADS.items()}
NAMES = sorted(WORKLOADS)


def container_of(name: str) -> dict[str, Any]:
    [container] = PODS[name]["spec"]["containers"]
    found: dict[str, Any] = container
    return found


def matching(selector: dict[str, Any]) -> set[str]:
    """Names of the workloads whose pods a selector of this file's kinds means."""
    found = set()
    for name, pod in PODS.items():
        labels = pod["metadata"]["labels"]
        equal = all(labels.get(key) == value for key, value in selector.get("matchLabels", selector).items())
        if "matchExpressions" in selector:
            equal = all(labels.get(rule["key"]) in rule["values"] for rule in selector["matchExpressions"])
        if equal:
            found.add(name)
    return found


def test_every_file_is_applied_and_every_document_is_of_a_known_kind() -> None:
    assert {path.name for path in FOLDER.glob("*.yaml")} == {"kustomization.yaml", *KUSTOMIZATION["resources"]}
    identities = [(found["kind"], found["metadata"]["name"]) for found in documents()]
    assert len(identities) == len(set(identities))
    for found in documents():
        assert found["apiVersion"] == API_VERSIONS[found["kind"]], found["metadata"]["name"]
        assert "namespace" not in found["metadata"], "the kustomization says it once"
    assert NAMES == ["nats", "router", "scheduler", "worker"]


@pytest.mark.parametrize("name", NAMES)
def test_a_workload_finds_its_own_pods_and_no_others(name: str) -> None:
    assert matching(WORKLOADS[name]["spec"]["selector"]) == {name}


@pytest.mark.parametrize("name", NAMES)
def test_images_are_renamed_by_the_kustomization(name: str) -> None:
    assert container_of(name)["image"] in {image["name"] for image in KUSTOMIZATION["images"]}
    folder = "deploy/nats" if name == "nats" else f"services/{name}"
    assert (ROOT / folder / "Dockerfile").exists()


@pytest.mark.parametrize("name", NAMES)
def test_probes_ask_ports_that_are_open(name: str) -> None:
    container = container_of(name)
    ports = {port["name"] for port in container["ports"]}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["port"] in ports, probe
    if name != "nats":
        assert container["livenessProbe"]["httpGet"]["path"] == "/live", "who is not ready is not restarted for it"
        assert container["readinessProbe"]["httpGet"]["path"] == "/health"


@pytest.mark.parametrize("name", NAMES)
def test_pods_have_no_privileges_and_are_limited(name: str) -> None:
    pod, container = PODS[name]["spec"], container_of(name)
    assert pod["automountServiceAccountToken"] is False
    assert pod["enableServiceLinks"] is False, "HEADRACE_PORT would be the address of a Service called headrace"
    assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] == 10001
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert container["resources"]["limits"]["memory"]
    assert container["resources"]["requests"]["cpu"]
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
    assert all("hostPath" not in volume for volume in pod["volumes"])
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    claims = {claim["metadata"]["name"] for claim in WORKLOADS[name]["spec"].get("volumeClaimTemplates", ())}
    assert mounts == {volume["name"] for volume in pod["volumes"]} | claims


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_what_is_set_are_settings_with_values_that_they_take(name: str) -> None:
    known = {f"HEADRACE_{field.name.upper()}" for field in msgspec.structs.fields(SETTINGS[name])}
    given = {variable["name"]: variable["value"] for variable in container_of(name)["env"]}
    assert set(given) <= known
    assert all(isinstance(value, str) for value in given.values()), "Kubernetes takes texts only"
    load_settings(SETTINGS[name], [], given, prog=name)


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_the_grace_period_covers_the_drain(name: str) -> None:
    default = next(f.default for f in msgspec.structs.fields(SETTINGS[name]) if f.name == "drain_timeout_s")
    env = {variable["name"]: variable["value"] for variable in container_of(name)["env"]}
    drain_s = float(env.get("HEADRACE_DRAIN_TIMEOUT_S", default))
    pre_stop_s = 5.0 if "lifecycle" in container_of(name) else 0.0
    assert PODS[name]["spec"]["terminationGracePeriodSeconds"] >= pre_stop_s + drain_s + STOP_TIMEOUT_S


def test_whoever_scales_names_what_exists_and_no_number_contradicts_it() -> None:
    scalers = [*documents("HorizontalPodAutoscaler"), *documents("ScaledObject")]
    assert {found["spec"]["scaleTargetRef"]["name"] for found in scalers} == {"router", "worker"}
    for found in scalers:
        target = WORKLOADS[found["spec"]["scaleTargetRef"]["name"]]
        assert "replicas" not in target["spec"], "an apply would undo what was scaled"
    [keda] = documents("ScaledObject")
    assert keda["spec"]["minReplicaCount"] <= keda["spec"]["maxReplicaCount"]
    [trigger] = keda["spec"]["triggers"]
    stream = requests_stream(1, 1).name
    assert trigger["metadata"]["valueLocation"].endswith(f'stream_detail.#(name=="{stream}").state.messages')
    ports = {
        port["port"]
        for found in documents("Service")
        if found["metadata"]["name"] == "nats"
        for port in found["spec"]["ports"]
    }
    assert trigger["metadata"]["url"] == f"http://nats.{KUSTOMIZATION['namespace']}.svc:8222/jsz?streams=true"
    assert 8222 in ports
    assert all(isinstance(value, str) for value in trigger["metadata"].values()), "KEDA takes texts only"


@pytest.mark.parametrize("name", NAMES)
def test_each_pod_sees_its_own_key_at_the_broker_and_no_other(name: str) -> None:
    secrets = [volume["secret"] for volume in PODS[name]["spec"]["volumes"] if "secret" in volume]
    owner = "broker" if name == "nats" else name
    assert secrets == [{"secretName": f"headrace-{owner}", "defaultMode": 0o440}]
    assert PODS[name]["spec"]["securityContext"]["fsGroup"] == 10001, "else nobody can read it"
    if name != "nats":
        env = {variable["name"]: variable["value"] for variable in container_of(name)["env"]}
        assert env["HEADRACE_BROKER_CREDENTIALS"] == "/run/headrace/user.nk"


def test_only_named_ways_are_open() -> None:
    policies = {found["metadata"]["name"]: found["spec"] for found in documents("NetworkPolicy")}
    assert policies["nothing"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    assert matching(policies["to-broker"]["podSelector"]) == {"router", "scheduler", "worker"}
    assert matching(policies["to-broker"]["egress"][0]["to"][0]["podSelector"]) == {"nats"}
    assert matching(policies["nats"]["podSelector"]) == {"nats"}
    clients, keda = policies["nats"]["ingress"]
    assert matching(clients["from"][0]["podSelector"]) == {"router", "scheduler", "worker"}
    assert [port["port"] for port in clients["ports"]] == [4222]
    assert "namespaceSelector" in keda["from"][0]
    entered = {name for name, policy in policies.items() if "ingress" in policy}
    assert entered == {"nats", "router"}, "nobody reaches workers and schedulers"


def test_services_lead_to_pods_and_ports() -> None:
    for service in documents("Service"):
        [name] = matching(service["spec"]["selector"])
        open_ports = {port["containerPort"] for port in container_of(name)["ports"]}
        assert {port["port"] for port in service["spec"]["ports"]} <= open_ports
    for budget in documents("PodDisruptionBudget"):
        assert matching(budget["spec"]["selector"]) == {budget["metadata"]["name"]}


def test_the_broker_takes_its_configuration_and_opens_its_monitor(tmp_path: Path) -> None:
    [config] = documents("ConfigMap")
    path = lay_out(tmp_path) / "headrace" / "kubernetes.conf"
    path.write_text(config["data"]["kubernetes.conf"])
    assert container_of("nats")["args"][-1] == "/etc/headrace/kubernetes.conf"
    check(path)
