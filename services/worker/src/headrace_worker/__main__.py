"""`python -m headrace_worker`: one worker, until SIGTERM."""

import sys

from headrace_shared.nats_bus import NatsBus
from headrace_shared.service import Service, run_service
from headrace_shared.settings import load_settings_or_exit
from headrace_worker.service import WorkerService
from headrace_worker.settings import WorkerSettings


def main() -> int:
    settings = load_settings_or_exit(
        WorkerSettings, prog="headrace-worker", description="Runs a model on this machine's device."
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
            await WorkerService(service, bus, settings).run()
        finally:
            await bus.close()

    return run_service(body, name="worker", settings=settings)


if __name__ == "__main__":
    sys.exit(main())
