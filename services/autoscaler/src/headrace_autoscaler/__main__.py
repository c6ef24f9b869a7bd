"""`python -m headrace_autoscaler`: the autoscaler, until SIGTERM."""

import sys

from headrace_autoscaler.service import Autoscaler
from headrace_autoscaler.settings import AutoscalerSettings
from headrace_shared.service import Service, run_service
from headrace_shared.service_bus import service_bus
from headrace_shared.settings import load_settings_or_exit


def main() -> int:
    settings = load_settings_or_exit(
        AutoscalerSettings, prog="headrace-autoscaler", description="Says how many workers each model should have."
    )

    async def body(service: Service) -> None:
        limits = settings.limits()
        async with service_bus(service, settings) as bus:
            await Autoscaler(bus, limits, settings.period_s).run(service)

    return run_service(body, name="autoscaler", settings=settings)


if __name__ == "__main__":
    sys.exit(main())
