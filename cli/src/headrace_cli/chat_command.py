"""`headrace chat`: talks to a model over the HTTP interface."""

import contextlib
import os
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import msgspec

from headrace_cli.errors import CommandError
from headrace_cli.router_client import router_client
from headrace_cli.settings import ChatSettings
from headrace_shared.settings import load_settings

QUESTION_S = 10.0
"""Longest wait for what is no answer of a model."""
MAX_TURNS = 1000
"""Messages kept of a conversation; the oldest are forgotten first."""


def run(argv: Sequence[str]) -> int:
    settings = load_settings(
        ChatSettings,
        argv,
        os.environ,
        prog="headrace chat",
        description="Talks to a model.",
    )
    timeout = httpx.Timeout(settings.timeout_s, connect=10.0)
    with router_client(settings.url, settings.api_key, timeout) as client:
        model = settings.model or _first_model(client)
        messages = [{"role": "system", "content": settings.system}] if settings.system else []
        if settings.quick:
            _answer(client, settings, model, [*messages, {"role": "user", "content": settings.quick}])
        else:
            _converse(client, settings, model, messages)
    return 0


def _converse(client: httpx.Client, settings: ChatSettings, model: str, messages: list[dict[str, str]]) -> None:
    sys.stdout.write(f"{model} at {settings.url}; Ctrl-D ends, Ctrl-C stops an answer.\n")
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - editing and history at the prompt
    while True:
        try:
            text = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            sys.stdout.write("\n")
            return
        if not text:
            continue
        messages.append({"role": "user", "content": text})
        try:
            answer = _answer(client, settings, model, messages)
        except KeyboardInterrupt:
            sys.stdout.write("\n")
            messages.pop()
            continue
        except CommandError as error:
            sys.stdout.write(f"{error}\n")
            messages.pop()
            continue
        messages.append({"role": "assistant", "content": answer})
        del messages[int(bool(settings.system)) : -MAX_TURNS]


def _answer(client: httpx.Client, settings: ChatSettings, model: str, messages: list[dict[str, str]]) -> str:
    """Prints the answer as it comes, and returns it. Raises CommandError if the server refuses or breaks off."""
    body: dict[str, Any] = {
        "model": model,
        "messages": messages,
        "max_completion_tokens": settings.max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if settings.temperature is not None:
        body["temperature"] = settings.temperature
    parts: list[str] = []
    num_tokens, started_at, first_at = 0, time.monotonic(), 0.0
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            response.read()
            raise _error_of(response)
        for event in _events(response):
            if "error" in event:
                raise CommandError(str(event["error"].get("message", event["error"])))
            num_tokens = (event.get("usage") or {}).get("completion_tokens", num_tokens)
            for choice in event.get("choices", ()):
                text = (choice.get("delta") or {}).get("content") or ""
                if text:
                    first_at = first_at or time.monotonic()
                    parts.append(text)
                    sys.stdout.write(text)
                    sys.stdout.flush()
    sys.stdout.write("\n")
    if num_tokens > 1 and first_at and sys.stderr.isatty():
        speed = (num_tokens - 1) / max(time.monotonic() - first_at, 1e-6)
        first_ms = 1000 * (first_at - started_at)
        sys.stderr.write(f"[{num_tokens} tokens, first after {first_ms:.0f} ms, then {speed:.1f}/s]\n")
    return "".join(parts)


def _events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """The JSON objects of a server-sent event stream. Raises CommandError if it ends without [DONE]."""
    for line in response.iter_lines():
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        try:
            yield msgspec.json.decode(data, type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise CommandError(f"the server sent no JSON: {data[:200]}") from error
    raise CommandError("the answer broke off")


def _first_model(client: httpx.Client) -> str:
    response = client.get("/v1/models", timeout=QUESTION_S)
    if response.status_code != 200:
        raise _error_of(response)
    try:
        models = [str(model["id"]) for model in response.json()["data"]]
    except (ValueError, KeyError, TypeError) as error:
        raise CommandError(
            "the server's list of models is not understandable", "is --url a Headrace router?"
        ) from error
    if not models:
        raise CommandError("the server has no model yet", "wait until a worker has loaded one")
    return models[0]


def _error_of(response: httpx.Response) -> CommandError:
    try:
        problem = str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        problem = f"HTTP {response.status_code}: {' '.join(response.text.split())[:300]}"
    if response.status_code == 401:
        return CommandError(problem.rstrip("."), "set HEADRACE_API_KEY or --api-key-file")
    return CommandError(problem)
