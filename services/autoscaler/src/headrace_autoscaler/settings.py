"""The autoscaler's settings."""

from typing import Annotated

from msgspec import Meta

from headrace_autoscaler.control import Plans
from headrace_autoscaler.driver_settings import DriverSettings
from headrace_autoscaler.policy import Limits
from headrace_autoscaler.repair import Bounds
from headrace_shared.errors import ConfigError


class AutoscalerSettings(DriverSettings, frozen=True, kw_only=True):
    """Settings of the autoscaler; those of every service come first."""

    served_models: tuple[str, ...] = ()
    """Models, by their names in the API and separated by commas, that can be started though no worker has run yet."""
    period_s: Annotated[float, Meta(ge=0.1, le=3600)] = 5.0
    """Time between two decisions."""
    min_workers: Annotated[int, Meta(ge=0, le=10_000)] = 1
    """Fewest workers of a model."""
    max_workers: Annotated[int, Meta(ge=1, le=10_000)] = 8
    """Most workers of a model."""
    scale_down_after_s: Annotated[float, Meta(ge=0, le=86400)] = 300.0
    """So long must fewer workers be enough before there are fewer."""
    scale_up_after_s: Annotated[float, Meta(ge=0, le=3600)] = 20.0
    """So long must more workers be needed before there are more, while no request waits for one."""
    scale_to_zero_after_s: Annotated[float, Meta(ge=0, le=86400)] = 900.0
    """Without a request for so long the last worker goes, if min_workers is 0."""
    ttft_target_s: Annotated[float, Meta(gt=0, le=3600)] = 2.0
    """Wanted time to first token."""
    target_load: Annotated[float, Meta(ge=0.1, le=1)] = 0.9
    """Share of each worker's capacity that is planned with; the rest takes bursts."""
    min_parked: Annotated[int, Meta(ge=0, le=1000)] = 0
    """Fewest workers of the warm pool: loaded, but taking no requests."""
    max_parked: Annotated[int, Meta(ge=0, le=1000)] = 0
    """Most workers of the warm pool; 0: there is none. Together with the others never above max_workers."""
    cost_per_worker_hour: Annotated[float, Meta(ge=0)] = 0.0
    """What a worker costs an hour, in whatever currency; 0: not known."""
    max_cost_per_hour: Annotated[float, Meta(ge=0)] = 0.0
    """Most that the workers of a model may cost an hour; 0: no limit."""

    stop_grace_s: Annotated[float, Meta(ge=0, le=3600)] = 30.0
    """Between SIGTERM and SIGKILL of a worker that is to go and does not by itself."""
    drain_limit_s: Annotated[float, Meta(ge=1, le=86400)] = 660.0
    """A worker that was told to drain is stopped after this time; longer than the workers' own drain_limit_s."""
    warm_up_s: Annotated[float, Meta(gt=0, le=86400)] = 30.0
    """Expected time from the start of a worker to its being ready, until one was measured."""

    def plans(self) -> Plans:
        """Raises ConfigError if settings contradict each other."""
        bounds = Bounds(self.stop_grace_s, self.drain_limit_s)
        return Plans(self.limits(), self.period_s, self.served_models, bounds, self.warm_up_s)

    def limits(self) -> Limits:
        """Raises ConfigError if the limits contradict each other."""
        if self.min_workers > self.max_workers:
            raise ConfigError("min_workers", f"{self.min_workers} exceeds max_workers, which is {self.max_workers}")
        if self.min_parked > self.max_parked:
            raise ConfigError("min_parked", f"{self.min_parked} exceeds max_parked, which is {self.max_parked}")
        limits = Limits(**{name: getattr(self, name) for name in Limits._fields})
        if limits.most_workers < max(1, self.min_workers):
            raise ConfigError("max_cost_per_hour", f"{self.max_cost_per_hour:g} does not pay for min_workers")
        return limits
