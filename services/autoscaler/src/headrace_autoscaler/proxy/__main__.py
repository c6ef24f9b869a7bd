"""`python -m headrace_autoscaler.proxy`: what stands between the autoscaler and the Docker engine, until SIGTERM.

The only process that has the engine's socket, which is as good as being root on the host.
"""

import asyncio
import sys

import structlog

from headrace_autoscaler.proxy.engine_socket import EngineSocket, EngineUnavailable
from headrace_autoscaler.proxy.gatekeeper import Gatekeeper
from headrace_autoscaler.proxy.http_server import HttpServer
from headrace_autoscaler.proxy.settings import ProxySettings
from headrace_shared.errors import ConfigError
from headrace_shared.service import Service, run_service
from headrace_shared.settings import load_settings_or_exit

PING_PERIOD_S = 2.0
GIVE_UP_AFTER_S = 30.0
"""An engine that was restarted has a new socket, which a container sees only once it starts again."""

log = structlog.get_logger(__name__)


class Liveness:
    """Whether the engine answers. Without one for too long the process ends, and its container starts again."""

    def __init__(self, engine: EngineSocket) -> None:
        self._engine = engine
        self.problem: str | None = "the engine has not been asked yet"

    async def watch(self, service: Service) -> None:
        loop = asyncio.get_running_loop()
        answered_at = loop.time()
        while True:
            try:
                await self._engine.call("GET", "/_ping", timeout_s=5.0)
                self.problem, answered_at = None, loop.time()
            except EngineUnavailable as error:
                self.problem = str(error)
                if loop.time() - answered_at > GIVE_UP_AFTER_S:
                    service.fail(self.problem)
            await asyncio.sleep(PING_PERIOD_S)


def main() -> int:
    settings = load_settings_or_exit(
        ProxySettings,
        prog="headrace-docker-proxy",
        description="Lets the autoscaler clone, start and stop this project's workers, and nothing else.",
    )

    async def body(service: Service) -> None:
        engine = EngineSocket(settings.docker_socket)
        gatekeeper = Gatekeeper(engine, settings.project, settings.max_containers, settings.swarm)
        server = HttpServer(gatekeeper.handle)
        try:
            port = await server.start(settings.proxy_host, settings.proxy_port)
        except OSError as error:
            reason = f"cannot listen on {settings.proxy_host}:{settings.proxy_port}: {error.strerror}"
            raise ConfigError("proxy_port", reason) from error
        try:
            liveness = Liveness(engine)
            service.spawn(liveness.watch(service), "liveness")
            service.set_ready(lambda: liveness.problem)
            log.info("ready", port=port, project=settings.project)
            await service.draining.wait()
        finally:
            await server.close()

    return run_service(body, name="docker-proxy", settings=settings)


if __name__ == "__main__":
    sys.exit(main())
