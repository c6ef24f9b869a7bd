"""A connection to a router's HTTP interface, for commands that are one of its clients."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import httpx

from headrace_cli.errors import CommandError
from headrace_cli.settings import is_loopback, server_url


@contextmanager
def router_client(url: str, api_key: str, timeout: httpx.Timeout) -> Iterator[httpx.Client]:
    """Raises CommandError, also within the block, if `url` is none or its router does not answer."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        with _open(url, headers, timeout) as client:
            yield client
    except httpx.InvalidURL as error:
        raise CommandError(f"--url {url}: {error}") from error
    except httpx.HTTPError as error:
        problem = f"{url} does not answer: {str(error) or type(error).__name__}"
        raise CommandError(problem, "start it with `headrace up` or name another with --url") from error


def _open(url: str, headers: Mapping[str, str], timeout: httpx.Timeout) -> httpx.Client:
    """Through the proxy that the environment names, but never to this machine. Raises CommandError, or InvalidURL."""
    base_url = httpx.URL(server_url(url))
    is_here = is_loopback(base_url.host)
    try:
        return httpx.Client(base_url=base_url, headers=headers, timeout=timeout, trust_env=not is_here)
    except (ImportError, ValueError) as error:
        problem = f"the proxy that the environment names cannot be used: {error}"
        raise CommandError(
            problem, "unset ALL_PROXY, HTTP_PROXY and HTTPS_PROXY, or list the host in NO_PROXY"
        ) from error
