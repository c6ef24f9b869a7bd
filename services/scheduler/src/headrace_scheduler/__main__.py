"""`python -m headrace_scheduler`: one scheduler, until SIGTERM."""

import sys

import headrace_shared.lean_imports  # noqa: F401 - first

# isort: split
from headrace_scheduler.service import SchedulerService
from headrace_scheduler.settings import SchedulerSettings
from headrace_shared.service import Service, run_service
from headrace_shared.service_bus import service_bus
from headrace_shared.settings import load_settings_or_exit
from headrace_shared.standard_streams import fill_standard_streams


def main() -> int:
    fill_standard_streams()
    settings = load_settings_or_exit(
        SchedulerSettings, prog="headrace-scheduler", description="Places queued requests on workers."
    )

    async def body(service: Service) -> None:
        async with service_bus(service, settings) as bus:
            await SchedulerService(service, bus, settings).run()

    return run_service(body, name="scheduler", settings=settings)


if __name__ == "__main__":
    sys.exit(main())
