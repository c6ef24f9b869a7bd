"""`python -m headrace_worker`: one worker (or several with a timing-model engine), until SIGTERM."""

import sys

import headrace_shared.lean_imports  # noqa: F401 - first

# isort: split
from headrace_shared.errors import ConfigError
from headrace_shared.service import Service, run_service
from headrace_shared.service_bus import service_bus
from headrace_shared.settings import load_settings_or_exit
from headrace_shared.standard_streams import fill_standard_streams
from headrace_worker.parallel.member_service import MemberService
from headrace_worker.service import WorkerService
from headrace_worker.settings import WorkerSettings
from headrace_worker.timing.host import TimingHost


def main() -> int:
    fill_standard_streams()
    settings = load_settings_or_exit(
        WorkerSettings, prog="headrace-worker", description="Runs a model on this machine's device."
    )

    async def body(service: Service) -> None:
        if settings.engine == "timing":
            await TimingHost(service, settings).run()
            return
        if settings.workers > 1:
            raise ConfigError("workers", "several in one process only with engine timing")
        async with service_bus(service, settings) as bus:
            # Of a worker on several machines, only the first one's process is a worker to the others.
            kind = WorkerService if settings.node_rank == 0 else MemberService
            await kind(service, bus, settings).run()

    return run_service(body, name="worker", settings=settings)


if __name__ == "__main__":
    sys.exit(main())
