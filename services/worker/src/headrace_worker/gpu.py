"""Figures of the GPUs that this worker uses, where the package nvidia-ml-py is installed (extra `gpu`).

Names follow OpenTelemetry's conventions for hardware. NVML may block for milliseconds, so it is asked in a thread.
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from importlib import import_module
from statistics import fmean
from typing import Any, NamedTuple

import structlog

from headrace_shared.telemetry import GPU_UTILIZATION, Instrument, Metrics

PERIOD_S = 2.0

UTILIZATION = Instrument("gauge", "hw_gpu_utilization_ratio", "Share of time with a kernel running.", ("hw_id",))
MEMORY_USED = Instrument("gauge", "hw_gpu_memory_usage_bytes", "Memory in use, by everybody.", ("hw_id",))
MEMORY_LIMIT = Instrument("gauge", "hw_gpu_memory_limit_bytes", "Memory in all.", ("hw_id",))
POWER = Instrument("gauge", "hw_power_watts", "Power drawn.", ("hw_id",))
TEMPERATURE = Instrument("gauge", "hw_temperature_celsius", "Temperature of the GPU.", ("hw_id",))

log = structlog.get_logger(__name__)


class GpuFigures(NamedTuple):
    utilization: float
    """0 to 1."""
    memory_used: int
    memory_limit: int
    """Bytes."""
    power_w: float | None
    temperature_c: float | None


def own_gpus(device: str, num_ranks: int, visible: str | None) -> list[int | str]:
    """Which GPUs the ranks of a worker use on this machine, as NVML knows them: by number or by UUID. `device`: as the
    engine names it; `visible`: CUDA_VISIBLE_DEVICES."""
    _, _, first = device.partition(":")
    start = int(first) if first.isdigit() else 0
    if visible is None:
        return list(range(start, start + num_ranks))
    names = [name.strip() for name in visible.split(",") if name.strip()]
    return [int(name) if name.isdigit() else name for name in names[start : start + num_ranks]]


class Nvml:
    """Not for event loops. `open` is None without the package, the driver or a GPU."""

    def __init__(self, library: Any, handles: list[Any]) -> None:
        self._library = library
        self._handles = handles

    @classmethod
    def open(cls, gpus: Sequence[int | str], library: Any = None) -> "Nvml | None":
        """`library`: for tests."""
        try:
            nvml = library if library is not None else import_module("pynvml")
        except ImportError:
            return None
        try:
            nvml.nvmlInit()
            handles = [
                nvml.nvmlDeviceGetHandleByIndex(gpu) if isinstance(gpu, int) else nvml.nvmlDeviceGetHandleByUUID(gpu)
                for gpu in gpus
            ]
        except nvml.NVMLError as error:
            log.info("no figures of GPUs", error=str(error))
            return None
        return cls(nvml, handles) if handles else None

    def read(self) -> dict[str, GpuFigures]:
        """By the GPU's id. What a GPU does not tell is left out."""
        figures: dict[str, GpuFigures] = {}
        for handle in self._handles:
            with contextlib.suppress(self._library.NVMLError):  # part of a shared GPU may not tell
                figures[str(self._library.nvmlDeviceGetUUID(handle))] = self._read(handle)
        return figures

    def _read(self, handle: Any) -> GpuFigures:
        nvml = self._library
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        milliwatts = self._optional(nvml.nvmlDeviceGetPowerUsage, handle)
        return GpuFigures(
            utilization=nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100.0,
            memory_used=int(memory.used),
            memory_limit=int(memory.total),
            power_w=None if milliwatts is None else milliwatts / 1000.0,
            temperature_c=self._optional(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
        )

    def _optional(self, read: Callable[..., float], *arguments: Any) -> float | None:
        try:
            return float(read(*arguments))
        except self._library.NVMLError:
            return None


class GpuWatch:
    """`run` is a task; without GPUs, or a library to ask, it ends at once."""

    def __init__(self, metrics: Metrics, open_nvml: Callable[[], Nvml | None]) -> None:
        self._metrics = metrics
        self._open_nvml = open_nvml
        self._utilization: float | None = None

    async def run(self) -> None:
        nvml = await asyncio.to_thread(self._open_nvml)
        if nvml is None:
            return
        gauges = [self._metrics.gauge(name) for name in (UTILIZATION, MEMORY_USED, MEMORY_LIMIT, POWER, TEMPERATURE)]
        while True:
            told = await asyncio.to_thread(nvml.read)
            for hw_id, figures in told.items():
                for gauge, value in zip(gauges, figures, strict=True):
                    if value is not None:
                        gauge.labels(hw_id).set(value)
            self._utilization = fmean(figures.utilization for figures in told.values()) if told else None
            await asyncio.sleep(PERIOD_S)

    def gauges(self) -> dict[str, float]:
        """For Telemetry."""
        return {} if self._utilization is None else {GPU_UTILIZATION: self._utilization}
