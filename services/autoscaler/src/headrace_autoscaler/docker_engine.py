"""The Docker Engine's API through the `docker` package, whose calls block: each runs in a thread and has a time limit.

The only module that imports docker.
"""

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import docker
import msgspec
import requests
from docker import errors as docker_errors

from headrace_autoscaler.driver import DriverError

CALL_TIMEOUT_S = 40.0
"""Longer than the proxy waits for the engine, so that the answer is its."""
MAX_CALLS = 8
MAX_STOPS = 24
"""A stop lasts as long as its container's grace."""
MIN_BACK_OFF_S = 0.5
MAX_BACK_OFF_S = 15.0

R = TypeVar("R")


class EngineRefused(DriverError):
    """The engine, or what stands before it, has answered no."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class BackOff:
    """After failures in a row nothing is tried for a time that doubles. Pure: time is an argument."""

    def __init__(self) -> None:
        self._num_failures = 0
        self._retry_at = 0.0
        self._reason = ""

    def check(self, now: float) -> None:
        """Raises DriverError if it is too early to try again."""
        if now < self._retry_at:
            raise DriverError(f"{self._reason}; tried again in {self._retry_at - now:.1f} s")

    def note_failure(self, reason: str, now: float) -> None:
        delay_s = min(MIN_BACK_OFF_S * 2.0 ** min(self._num_failures, 16), MAX_BACK_OFF_S)
        self._num_failures += 1
        self._retry_at, self._reason = now + delay_s, reason

    def note_success(self) -> None:
        self._num_failures, self._retry_at = 0, 0.0


class DockerEngine:
    """Every method raises DriverError: EngineRefused for an answer that says no, else there was no answer."""

    def __init__(self, url: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._url = url
        self._clock = clock
        self._client: docker.APIClient | None = None
        self._connecting = threading.Lock()
        self._threads = ThreadPoolExecutor(MAX_CALLS + MAX_STOPS, thread_name_prefix="docker")
        self._calls = asyncio.Semaphore(MAX_CALLS)
        self._stops = asyncio.Semaphore(MAX_STOPS)
        self._back_off = BackOff()

    async def containers(self) -> list[dict[str, Any]]:
        """Summaries of those that the proxy shows: the project's workers."""
        found: list[dict[str, Any]] = await self._call(lambda client: client.containers(all=True))
        return found

    async def inspect(self, container: str) -> dict[str, Any] | None:
        """None if there is none."""
        try:
            found: dict[str, Any] = await self._call(lambda client: client.inspect_container(container))
        except EngineRefused as error:
            if error.status == 404:
                return None
            raise
        return found

    async def create(self, name: str, body: dict[str, Any]) -> str:
        """Returns the id."""
        made = await self._call(lambda client: client.create_container_from_config(body, name))
        return str(made["Id"])

    async def start(self, container: str) -> None:
        await self._call(lambda client: client.start(container))

    async def stop(self, container: str, grace_s: int) -> None:
        """One that does not run, or is not there, is no error."""
        await self._unless_gone(lambda client: client.stop(container, timeout=grace_s), grace_s)

    async def remove(self, container: str) -> None:
        """Kills it if it runs. One that is not there, or is being removed, is no error."""
        await self._unless_gone(lambda client: client.remove_container(container, v=True, force=True))

    async def services(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = await self._call(lambda client: client.services())
        return found

    async def tasks(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = await self._call(lambda client: client.tasks())
        return found

    async def update_service(self, service: str, version: int, spec: dict[str, Any]) -> None:
        """With exactly this specification; the package's own method merges others in."""

        def post(client: docker.APIClient) -> None:
            url = f"{client.base_url}/v{client.api_version}/services/{service}/update"
            answer = client.post(url, params={"version": version}, json=spec, timeout=CALL_TIMEOUT_S)
            if answer.status_code >= 400:
                raise EngineRefused(answer.status_code, _message(answer))

        await self._call(post)

    async def close(self) -> None:
        """Calls that still run end by themselves."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._client is not None:
            self._client.close()

    async def _unless_gone(self, call: Callable[[docker.APIClient], Any], extra_s: float = 0.0) -> None:
        try:
            await self._call(call, extra_s)
        except EngineRefused as error:
            if error.status not in (304, 404, 409):
                raise

    async def _call(self, call: Callable[[docker.APIClient], R], extra_s: float = 0.0) -> R:
        self._back_off.check(self._clock())
        loop, slots = asyncio.get_running_loop(), self._stops if extra_s else self._calls
        try:
            # The thread ends by itself: sockets have a time limit. The outer limit is for waiting in line.
            async with asyncio.timeout(CALL_TIMEOUT_S + extra_s + 10.0), slots:
                result = await loop.run_in_executor(self._threads, self._in_thread, call)
        except docker_errors.APIError as error:
            status = error.response.status_code if error.response is not None else 500
            raise self._refused(status, " ".join(str(error.explanation or error).split())) from error
        except EngineRefused as error:
            raise self._refused(error.status, str(error)) from error
        except (docker_errors.DockerException, requests.RequestException, TimeoutError, OSError) as error:
            reason = f"the Docker engine cannot be reached at {self._url}: {_cause(error)}"
            self._back_off.note_failure(reason, self._clock())
            raise DriverError(reason) from error
        self._back_off.note_success()
        return result

    def _refused(self, status: int, reason: str) -> DriverError:
        if status == 503:  # nobody behind the proxy, or a Swarm without a leader
            self._back_off.note_failure(reason, self._clock())
            return DriverError(reason)
        self._back_off.note_success()
        return EngineRefused(status, reason)

    def _in_thread(self, call: Callable[[docker.APIClient], R]) -> R:
        return call(self._connected())

    def _connected(self) -> docker.APIClient:
        """Connects at the first call, since the engine has to say which version of its API it speaks."""
        with self._connecting:
            if self._client is None:
                client = docker.APIClient(self._url, version="auto", timeout=int(CALL_TIMEOUT_S), max_pool_size=32)
                client.trust_env = False
                self._client = client
            return self._client


def _message(answer: requests.Response) -> str:
    try:
        return str(msgspec.json.decode(answer.content)["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return f"status {answer.status_code}"


def _cause(error: BaseException) -> str:
    """The last of what led to it, on one line: the first are layers of libraries."""
    while (below := error.__cause__ or error.__context__) is not None:
        error = below
    return " ".join(str(error).split()) or type(error).__name__
