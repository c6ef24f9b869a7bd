"""Whether a router answers: its health, and one real generation."""

import httpx

TIMEOUT_S = 60.0
GRACE_S = 5.0
"""For the router to say itself that the time is up."""
MAX_TOKENS = 1
BUSY = frozenset({"queue_full", "wait_too_long", "deadline_unreachable"})
"""Codes of refusals for the sake of what waits already."""


def base_url(host: str, port: int) -> str:
    """Where to reach a router that listens at `host`."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "": "127.0.0.1"}.get(host, host)
    if ":" in reachable and not reachable.startswith("["):
        reachable = f"[{reachable}]"
    return f"http://{reachable}:{port}"


async def generate(client: httpx.AsyncClient, url: str, model: str) -> str | None:
    """Has one token generated. None if it worked, if the router answers nobody without an API key (there may be none
    yet), or if it refuses for what waits already: the queue outlives an instance, and may be long when the next begins.
    Else why not, in one line."""
    body = {"model": model, "prompt": "Hello", "max_tokens": MAX_TOKENS, "temperature": 0}
    try:
        headers = {"Headrace-Timeout": f"{TIMEOUT_S:g}"}
        response = await client.post(f"{url}/v1/completions", json=body, headers=headers, timeout=TIMEOUT_S + GRACE_S)
        if response.status_code == 401:
            return None
        if response.status_code in (429, 503, 529) and response.json()["error"]["code"] in BUSY:
            return None
        if response.status_code == 200 and response.json()["usage"]["completion_tokens"] >= 1:
            return None
        return f"HTTP {response.status_code}: {' '.join(response.text.split())[:300]}"
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        return f"{type(error).__name__}: {error}"[:300]
