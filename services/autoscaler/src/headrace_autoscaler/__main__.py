"""`python -m headrace_autoscaler`: the autoscaler, until SIGTERM."""

import sys

import headrace_shared.lean_imports  # noqa: F401 - first

# isort: split
from headrace_autoscaler.driver_settings import make_driver
from headrace_autoscaler.service import Autoscaler
from headrace_autoscaler.settings import AutoscalerSettings
from headrace_shared.service import Service, run_service
from headrace_shared.service_bus import service_bus
from headrace_shared.settings import load_settings_or_exit
from headrace_shared.standard_streams import fill_standard_streams


def main() -> int:
    fill_standard_streams()
    settings = load_settings_or_exit(
        AutoscalerSettings,
        prog="headrace-autoscaler",
        description="Starts and stops workers as the load asks for, or only says how many there should be.",
    )

    async def body(service: Service) -> None:
        driver = make_driver(settings)
        try:
            async with service_bus(service, settings) as bus:
                await Autoscaler(service, bus, settings.plans(), driver).run()
        finally:
            if driver is not None:
                await driver.close()

    return run_service(body, name="autoscaler", settings=settings)


if __name__ == "__main__":
    sys.exit(main())
