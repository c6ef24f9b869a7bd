"""What a simulated run leaves behind: figures over all of it, and series by the minute."""

import numpy as np
from msgspec import Struct

from headrace_simulator.arrivals import Floats
from headrace_simulator.cluster import Load
from headrace_simulator.fleet import Counts

MINUTE_S = 60.0
_FIRST_S, _LAST_S, _BINS_PER_DECADE = 1e-3, 1e4, 100
_NUM_BINS = round(float(np.log10(_LAST_S / _FIRST_S)) * _BINS_PER_DECADE)


class Series(Struct, frozen=True, kw_only=True):
    """One value for each minute. None: no request got its first token then."""

    minutes: list[float]
    """From the start, at the end of each."""
    arrivals_per_s: list[float]
    queue: list[int]
    """Requests that no worker had, at the end of the minute."""
    ready: list[int]
    starting: list[int]
    parked: list[int]
    ttft_p50_s: list[float | None]
    ttft_p99_s: list[float | None]
    shed: list[int]
    cost_per_hour: list[float]
    utilization: list[float]


class Result(Struct, frozen=True, kw_only=True):
    policy: str
    num_requests: int
    num_shed: int
    num_unserved: int
    """Without a first token at the end."""
    ttft_p50_s: float
    ttft_p99_s: float
    target_s: float
    within_target: float
    """Share of all requests, those that were shed or not served included, whose first token came in time."""
    gpu_hours: float
    cost: float
    mean_workers: float
    max_workers: int
    """Ready at a time."""
    changes_per_hour: float
    """Of how many workers are wanted."""
    num_cold_starts: int
    num_promotions: int
    wall_s: float
    """That the simulation took."""
    series: Series


class Recorder:
    def __init__(self, policy: str, target_s: float, weight: int, cost_per_worker_hour: float) -> None:
        self._policy = policy
        self._target_s = target_s
        self._weight = weight
        self._cost_per_worker_hour = cost_per_worker_hour
        self._bins = np.zeros(_NUM_BINS + 1, np.int64)
        self._num_in_time = 0
        self._num_served = 0
        self._num_arrived = 0
        self._num_shed = 0
        self._num_changes = 0
        self._desired: int | None = None
        self._max_ready = 0
        self._minute: list[Floats] = []
        self._minute_arrived = 0
        self._minute_shed = 0
        self._minute_utilization: list[float] = []
        self._series = Series(
            **{name: [] for name in Series.__struct_fields__},  # filled minute by minute
        )

    def on_step(self, num_arrived: int, num_shed: int, ttft_s: Floats, num_ready: int, load: Load) -> None:
        """In simulated requests."""
        self._num_arrived += num_arrived
        self._num_shed += num_shed
        self._minute_arrived += num_arrived
        self._minute_shed += num_shed
        self._max_ready = max(self._max_ready, num_ready)
        self._minute_utilization.append(load.utilization)
        if len(ttft_s):
            self._num_served += len(ttft_s)
            self._num_in_time += int((ttft_s <= self._target_s).sum())
            at = np.log10(np.maximum(ttft_s, _FIRST_S) / _FIRST_S) * _BINS_PER_DECADE
            self._bins += np.bincount(np.minimum(at.astype(np.int64), _NUM_BINS), minlength=_NUM_BINS + 1)
            self._minute.append(ttft_s)

    def on_decision(self, desired: int) -> None:
        self._num_changes += self._desired is not None and desired != self._desired
        self._desired = desired

    def on_minute(self, now: float, counts: Counts, load: Load) -> None:
        ttft_s = np.concatenate(self._minute) if self._minute else None
        p50, p99 = (None, None) if ttft_s is None else (float(each) for each in np.percentile(ttft_s, (50, 99)))
        series, weight = self._series, self._weight
        series.minutes.append(now / MINUTE_S)
        series.arrivals_per_s.append(self._minute_arrived * weight / MINUTE_S)
        series.queue.append(load.num_waiting * weight)
        series.ready.append(counts.ready)
        series.starting.append(counts.starting + counts.parking)
        series.parked.append(counts.parked)
        series.ttft_p50_s.append(p50)
        series.ttft_p99_s.append(p99)
        series.shed.append(self._minute_shed * weight)
        series.cost_per_hour.append(counts.total * self._cost_per_worker_hour)
        series.utilization.append(float(np.mean(self._minute_utilization)))
        self._minute = []
        self._minute_arrived = self._minute_shed = 0
        self._minute_utilization = []

    def result(
        self,
        *,
        duration_s: float,
        worker_s: float,
        gpus_per_worker: int,
        cold_starts: int,
        promotions: int,
        wall_s: float,
    ) -> Result:
        weight = self._weight
        hours = duration_s / 3600
        return Result(
            policy=self._policy,
            num_requests=self._num_arrived * weight,
            num_shed=self._num_shed * weight,
            num_unserved=(self._num_arrived - self._num_shed - self._num_served) * weight,
            ttft_p50_s=self._quantile(0.5),
            ttft_p99_s=self._quantile(0.99),
            target_s=self._target_s,
            within_target=self._num_in_time / self._num_arrived if self._num_arrived else 1.0,
            gpu_hours=worker_s * gpus_per_worker / 3600,
            cost=worker_s / 3600 * self._cost_per_worker_hour,
            mean_workers=worker_s / duration_s,
            max_workers=self._max_ready,
            changes_per_hour=self._num_changes / hours,
            num_cold_starts=cold_starts,
            num_promotions=promotions,
            wall_s=wall_s,
            series=self._series,
        )

    def _quantile(self, share: float) -> float:
        """To about two percent."""
        total = int(self._bins.sum())
        if not total:
            return 0.0
        at = int(np.searchsorted(np.cumsum(self._bins), share * total))
        return float(_FIRST_S * 10 ** ((at + 0.5) / _BINS_PER_DECADE))
