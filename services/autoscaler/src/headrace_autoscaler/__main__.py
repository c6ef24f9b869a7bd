"""`python -m headrace_autoscaler`: the autoscaler's process."""

import sys

from headrace_autoscaler.service import Autoscaler
from headrace_autoscaler.settings import AutoscalerSettings
from headrace_shared.nats_bus import NatsBus
from headrace_shared.service import Service, run_service
from headrace_shared.settings import load_settings_or_exit


async def serve(service: Service, settings: AutoscalerSettings) -> None:
    limits = settings.limits()
    bus = await NatsBus.connect(
        [url.strip() for url in settings.nats_url.split(",")],
        name=service.id,
        on_closed=lambda: service.fail("the broker connection is closed for good"),
        user=settings.nats_user or None,
        password=settings.nats_password or None,
    )
    try:
        await Autoscaler(bus, limits, settings.period_s).run(service)
    finally:
        await bus.close()


def main() -> int:
    settings = load_settings_or_exit(AutoscalerSettings, prog="headrace-autoscaler")
    return run_service(lambda service: serve(service, settings), name="autoscaler", settings=settings)


if __name__ == "__main__":
    sys.exit(main())
