"""Whether a router answers: its health, and one real generation."""

import httpx

TIMEOUT_S = 60.0
MAX_TOKENS = 1


def base_url(host: str, port: int) -> str:
    """Where to reach a router that listens at `host`."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "": "127.0.0.1"}.get(host, host)
    if ":" in reachable and not reachable.startswith("["):
        reachable = f"[{reachable}]"
    return f"http://{reachable}:{port}"


async def generate(client: httpx.AsyncClient, url: str, model: str) -> str | None:
    """Has one token generated. None if it worked, or if the router answers nobody without an API key: there may be none
    yet. Else why not, in one line."""
    body = {"model": model, "prompt": "Hello", "max_tokens": MAX_TOKENS, "temperature": 0}
    try:
        response = await client.post(f"{url}/v1/completions", json=body, timeout=TIMEOUT_S)
        if response.status_code == 401:
            return None
        if response.status_code == 200 and response.json()["usage"]["completion_tokens"] >= 1:
            return None
        return f"HTTP {response.status_code}: {' '.join(response.text.split())[:300]}"
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        return f"{type(error).__name__}: {error}"[:300]
