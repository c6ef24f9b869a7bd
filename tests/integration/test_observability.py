"""What dashboards and alerts name is what a running system tells."""

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.integration.deployment import Client, Deployment, free_port, until, until_status
from tests.integration.promql import metric_names

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "observability"
DASHBOARDS = sorted((FOLDER / "grafana" / "dashboards").glob("*.json"))
ALERTS = [rule for group in yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"] for rule in group["rules"]]
ELSEWHERE = re.compile(r"jetstream_\w+|gnatsd_varz_\w+|up")
"""Of the broker's exporter, and Prometheus's own."""
GPU = re.compile(r"hw_\w+")
VLLM = {
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:num_preemptions_total",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:request_success_total",
    "vllm:prompt_tokens_cached_total",
    "vllm:time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds",
    "vllm:request_time_per_output_token_seconds",
    "vllm:e2e_request_latency_seconds",
    "vllm:request_queue_time_seconds",
    "vllm:request_inference_time_seconds",
    "vllm:request_prefill_time_seconds",
    "vllm:request_decode_time_seconds",
    "vllm:request_prompt_tokens",
    "vllm:request_generation_tokens",
    "vllm:iteration_tokens_total",
    "vllm:request_params_n",
    "vllm:request_params_max_tokens",
    "vllm:cache_config_info",
}
"""What dashboards and load tools made for vLLM read."""


def names_in(text: str) -> dict[str, str]:
    """Names of samples that /metrics shows or would show -> the family's name."""
    names: dict[str, str] = {}
    for family in text_string_to_metric_families(text):
        suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}.get(family.type, ("",))
        names |= {family.name + suffix: family.name for suffix in suffixes}
    return names


def expressions() -> list[tuple[str, str]]:
    found = [(rule["alert"], rule["expr"]) for rule in ALERTS]
    for path in DASHBOARDS:
        for panel in json.loads(path.read_text())["panels"]:
            found += [(f"{path.stem}: {panel['title']}", target["expr"]) for target in panel.get("targets", ())]
    return found


@pytest.mark.nats
async def test_every_metric_is_told_by_a_running_system(
    deployment: Deployment, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")  # nobody is there, which is told too
    url = await deployment.router(model="scripted")
    ports = {name: free_port() for name in ("scheduler", "worker", "autoscaler")}
    await deployment.scheduler("scheduler", health_port=ports["scheduler"])
    await deployment.worker("worker", engine="tests.scripted_text", health_port=ports["worker"])
    await deployment._start("headrace_autoscaler", "autoscaler", {"health_port": ports["autoscaler"]}, {})
    told: dict[str, str] = {}
    async with httpx.AsyncClient(timeout=60) as http:
        await until_status(http, f"{url}/health", 200)
        body = {"model": "scripted", "prompt": '{"echo": "ab"}', "max_tokens": 4}
        assert (await http.post(f"{url}/v1/completions", json=body)).status_code == 200
        await until(lambda: client.gauge("scheduler", "num_requests") == 0, what="figures")
        for address in (url, *(f"http://127.0.0.1:{port}" for port in ports.values())):
            await until_status(http, f"{address}/metrics", 200)
            told |= names_in((await http.get(f"{address}/metrics")).text)
    missing = {
        (where, name)
        for where, expression in expressions()
        for name in metric_names(expression.replace("$__rate_interval", "1m"))
        if name not in told and not ELSEWHERE.fullmatch(name) and not GPU.fullmatch(name)
    }
    assert not missing, missing
    families = {*told, *told.values()}
    assert families >= VLLM, VLLM - families


def test_every_alert_has_its_section() -> None:
    headings = set(re.findall(r"^## (\w+)$", (ROOT / "docs" / "runbook.md").read_text(), flags=re.MULTILINE))
    assert {rule["alert"] for rule in ALERTS} == headings
    for rule in ALERTS:
        assert rule["annotations"]["runbook"] == f"docs/runbook.md#{rule['alert'].lower()}"
        assert rule["annotations"]["summary"] and rule["labels"]["severity"] in ("warning", "critical")


def test_dashboards_are_whole() -> None:
    dashboards = [json.loads(path.read_text()) for path in DASHBOARDS]
    assert {path.stem for path in DASHBOARDS} == {"fleet", "requests", "engine", "broker", "autoscaler"}
    assert len({dashboard["uid"] for dashboard in dashboards}) == len(dashboards)
    for dashboard in dashboards:
        places: set[tuple[int, int]] = set()
        for panel in dashboard["panels"]:
            place = panel["gridPos"]
            own = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
            assert not own & places, f"{panel['title']} lies upon another panel"
            places |= own
            assert panel["type"] == "row" or panel["targets"], panel["title"]


def test_prometheus_finds_what_compose_runs() -> None:
    services: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    config = yaml.safe_load((FOLDER / "prometheus.yaml").read_text())
    for job in config["scrape_configs"]:
        for found in job.get("dns_sd_configs", ()):
            assert set(found["names"]) <= set(services), job
    pipeline = yaml.safe_load((FOLDER / "collector.yaml").read_text())
    for exporter in pipeline["service"]["pipelines"]["traces"]["exporters"]:
        assert pipeline["exporters"][exporter]["endpoint"].split(":")[0] in services
    mounted = {
        mount.split(":")[0]
        for service in services.values()
        for mount in service.get("volumes", ())
        if mount.startswith("./deploy/")
    }
    assert mounted and all((ROOT / path).exists() for path in mounted), mounted


@pytest.mark.parametrize("broken", ["sum(rate(a[5m])", "sum(rate(a[5m)])", "1 + 2"])
def test_a_broken_expression_is_noticed(broken: str) -> None:
    with pytest.raises(ValueError):
        metric_names(broken)


def test_names_are_found_in_expressions() -> None:
    expression = 'sum by (le) (rate(a_bucket{b="c",d=~"e{2}"}[5m])) / on (x) f > 1e3 and deriv(g[5m:15s]) unless h:i'
    assert metric_names(expression) == {"a_bucket", "f", "g", "h:i"}
