import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from headrace_shared.telemetry import GPU_UTILIZATION, Metrics
from headrace_worker.gpu import GpuWatch, Nvml, own_gpus
from tests.integration.deployment import until


class NVMLError(Exception):
    pass


class FakeNvml:
    """As much of the library as is used, with one GPU that tells all and one that keeps some things to itself."""

    NVMLError = NVMLError
    NVML_TEMPERATURE_GPU = 0

    def __init__(self, has_driver: bool = True) -> None:
        self._has_driver = has_driver

    def nvmlInit(self) -> None:
        if not self._has_driver:
            raise NVMLError("no driver")

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        return int(uuid.removeprefix("GPU-"))

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle}"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        if handle == 2:
            raise NVMLError("not supported")
        return SimpleNamespace(used=2 << 30, total=8 << 30)

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        return SimpleNamespace(gpu=40 + handle)

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        if handle == 1:
            raise NVMLError("not supported")
        return 250_000

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:
        return 55


def test_without_a_driver_there_are_no_figures() -> None:
    assert Nvml.open([0], FakeNvml(has_driver=False)) is None
    assert Nvml.open([], FakeNvml()) is None


@pytest.mark.parametrize(
    ("device", "num_ranks", "visible", "own"),
    [
        ("cuda", 1, None, [0]),
        ("cuda:2", 1, None, [2]),
        ("cuda", 2, None, [0, 1]),
        ("cuda", 1, "3", [3]),
        ("cuda:1", 1, "3, GPU-7", ["GPU-7"]),
        ("cuda", 4, "3,1", [3, 1]),
    ],
)
def test_a_worker_looks_at_its_own_gpus(device: str, num_ranks: int, visible: str | None, own: list[int | str]) -> None:
    assert own_gpus(device, num_ranks, visible) == own


async def test_what_gpus_tell_is_shown_and_what_they_do_not_is_absent() -> None:
    metrics = Metrics()
    watch = GpuWatch(metrics, lambda: Nvml.open([0, 1, "GPU-2"], FakeNvml()))
    assert watch.gauges() == {}
    task = asyncio.create_task(watch.run())
    value = metrics.registry.get_sample_value
    await until(lambda: value("hw_gpu_utilization_ratio", {"hw_id": "GPU-1"}) is not None)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert value("hw_gpu_utilization_ratio", {"hw_id": "GPU-0"}) == pytest.approx(0.4)
    assert value("hw_gpu_memory_usage_bytes", {"hw_id": "GPU-0"}) == 2 << 30
    assert value("hw_gpu_memory_limit_bytes", {"hw_id": "GPU-0"}) == 8 << 30
    assert value("hw_power_watts", {"hw_id": "GPU-0"}) == pytest.approx(250.0)
    assert value("hw_power_watts", {"hw_id": "GPU-1"}) is None
    assert value("hw_gpu_utilization_ratio", {"hw_id": "GPU-2"}) is None
    assert watch.gauges() == {GPU_UTILIZATION: pytest.approx(0.405)}
