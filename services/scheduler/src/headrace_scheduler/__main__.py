"""`python -m headrace_scheduler`: one scheduler, until SIGTERM."""

import sys

from headrace_scheduler.service import SchedulerService
from headrace_scheduler.settings import SchedulerSettings
from headrace_shared.nats_bus import NatsBus
from headrace_shared.service import Service, run_service
from headrace_shared.settings import load_settings_or_exit


def main() -> int:
    settings = load_settings_or_exit(
        SchedulerSettings, prog="headrace-scheduler", description="Places queued requests on workers."
    )

    async def body(service: Service) -> None:
        bus = await NatsBus.connect(
            settings.nats_url.split(","),
            name=service.id,
            on_closed=lambda: service.fail("the broker's connection is closed for good"),
            user=settings.nats_user or None,
            password=settings.nats_password or None,
        )
        try:
            await SchedulerService(service, bus, settings).run()
        finally:
            await bus.close()

    return run_service(body, name="scheduler", settings=settings)


if __name__ == "__main__":
    sys.exit(main())
