"""The autoscaler's settings."""

from typing import Annotated

from msgspec import Meta

from headrace_autoscaler.policy import Limits
from headrace_shared.errors import ConfigError
from headrace_shared.settings import CommonSettings


class AutoscalerSettings(CommonSettings, frozen=True, kw_only=True):
    """Settings of the autoscaler; those of every service come first."""

    period_s: Annotated[float, Meta(ge=0.1, le=3600)] = 5.0
    """Time between two decisions."""
    min_workers: Annotated[int, Meta(ge=0, le=10_000)] = 1
    """Fewest workers of a model."""
    max_workers: Annotated[int, Meta(ge=1, le=10_000)] = 8
    """Most workers of a model."""
    scale_down_after_s: Annotated[float, Meta(ge=0, le=86400)] = 300.0
    """So long must fewer workers be enough before there are fewer."""

    def limits(self) -> Limits:
        """Raises ConfigError if the limits contradict each other."""
        if self.min_workers > self.max_workers:
            raise ConfigError("min_workers", f"{self.min_workers} exceeds max_workers, which is {self.max_workers}")
        return Limits(self.min_workers, self.max_workers, self.scale_down_after_s)
