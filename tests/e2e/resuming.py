"""A client that goes on at another router whenever its connection breaks."""

import asyncio
import json
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import httpx

HELD_ID = "headrace-request-id"
RESUMABLE = {"Headrace-Resumable": "true"}
MAX_TRIES = 60


class Event(NamedTuple):
    id: str | None
    data: str


class Story(NamedTuple):
    """What a client got, over however many connections."""

    request_id: str
    events: list[Event]
    num_breaks: int

    def chunks(self) -> list[dict[str, Any]]:
        """Decoded, without what is different each time that the same is asked for."""
        decoded = [json.loads(event.data) for event in self.events[:-1]]
        return [{key: value for key, value in chunk.items() if key not in ("id", "created")} for chunk in decoded]

    def choices(self) -> dict[int, dict[str, Any]]:
        """Each choice as one: text, log-probabilities, end."""
        choices: dict[int, dict[str, Any]] = {}
        for chunk in self.chunks():
            for told in chunk["choices"]:
                choice = choices.setdefault(told["index"], {"text": "", "logprobs": [], "ends": [], "roles": 0})
                delta = told.get("delta", told)
                choice["text"] += delta.get("content") or delta.get("text") or ""
                choice["roles"] += "role" in delta
                logprobs = told["logprobs"] or {}
                choice["logprobs"] += logprobs.get("content") or logprobs.get("token_logprobs") or []
                if told["finish_reason"] is not None:
                    choice["ends"].append((told["finish_reason"], told["stop_reason"]))
        return choices

    def usage(self) -> Any:
        return self.chunks()[-1].get("usage")


async def tell(
    client: httpx.AsyncClient,
    urls: Sequence[str],
    path: str,
    body: dict[str, Any],
    *,
    on_event: Callable[[int], None] = lambda number: None,
    headers: dict[str, str] | None = None,
    request_id: str = "",
) -> Story:
    """Asks the first of `urls`; whenever the connection breaks, the next. `on_event` hears how many events there are.
    With a `request_id` that call is told from its beginning. Raises AssertionError for any other answer than the whole
    one."""
    events: list[Event] = []
    num_breaks = 0
    for number in range(MAX_TRIES):
        url = urls[number % len(urls)]
        given = dict(headers or RESUMABLE) | ({"Last-Event-ID": str(events[-1].id)} if events else {})
        if not request_id:
            asked = client.stream("POST", url + path, json=body, headers=given)
        else:
            asked = client.stream("GET", f"{url}/v1/requests/{request_id}", headers=given)
        try:
            async with asked as reply:
                if reply.status_code == 503:  # it has just started again
                    await asyncio.sleep(0.1)
                    continue
                assert reply.status_code == 200, await reply.aread()
                request_id = reply.headers[HELD_ID]
                event_id = None
                async for line in reply.aiter_lines():
                    if line.startswith("id: "):
                        event_id = line.removeprefix("id: ")
                    elif line.startswith("data: "):
                        event = Event(event_id, line.removeprefix("data: "))
                        assert '"error":' not in event.data, event
                        events.append(event)
                        event_id = None
                        on_event(len(events))
            if events and events[-1].data == "[DONE]":
                return Story(request_id, events, num_breaks)
            raise AssertionError("a clean end that is none")
        except (httpx.RemoteProtocolError, httpx.ReadError):
            num_breaks += 1
        except httpx.ConnectError:
            await asyncio.sleep(random.uniform(0.02, 0.1))
    raise AssertionError(f"no end after {MAX_TRIES} tries, {len(events)} events")
