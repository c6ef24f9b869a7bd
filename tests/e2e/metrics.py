"""Reads /metrics of the services of a running system."""

import asyncio
import time

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.launcher import Launched
from tests.patience import PATIENCE_S


async def metric(system: Launched, service: str, name: str, **labels: str) -> float:
    """The sum of a sample over all processes of a service, and over all labels that are not given."""
    total = 0.0
    async with httpx.AsyncClient(timeout=30) as client:
        for process in system.processes(service):
            port = process["port"] if service == "router" else process["health_port"]
            text = (await client.get(f"http://127.0.0.1:{port}/metrics")).text
            samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
            total += sum(
                sample.value for sample in samples if sample.name == name and labels.items() <= sample.labels.items()
            )
    return total


async def wait_for_metric(system: Launched, service: str, name: str, value: float) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while (seen := await metric(system, service, name)) != value:
        assert time.monotonic() < deadline, f"{service} {name} is {seen}, not {value}, after {PATIENCE_S} s"
        await asyncio.sleep(0.1)
