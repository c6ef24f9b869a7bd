"""Clients that note everything: what they asked for, each token and when it came, and how each answer ended.

A client whose connection breaks does as the API says: it comes back at another router with the request's id and the
last event's, or repeats a POST that was never answered with the same key.
"""

import asyncio
import itertools
import json
import random
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.e2e.api import Answer

PATIENCE_S = 240.0
"""An answer that is not complete by then is lost."""
RETRY_S = 0.2


@dataclass
class Call:
    """One answer, over all connections that it took."""

    path: str
    body: dict[str, Any]
    answer: Answer = field(default_factory=Answer)
    request_id: str | None = None
    last_event_id: str | None = None
    num_connections: int = 0
    num_clean_cuts: int = 0
    """Connections that ended without an error of the transport, though the answer was not complete."""
    refusals: list[str] = field(default_factory=list)
    stalls_s: list[float] = field(default_factory=list)
    """Times between one event with text (or the beginning) and the next."""
    heard_at: float = field(default_factory=time.monotonic)
    """When the latest event with text came, over whichever connection; before the first the beginning."""
    problem: str = ""
    """Why the answer is lost."""

    @property
    def is_complete(self) -> bool:
        return self.answer.num_done > 0

    def outcome(self) -> dict[int, tuple[str, str | None]]:
        return self.answer.outcome()


class Crowd:
    """Calls against any of `urls`; each goes to one at random and, when cut, to the others."""

    def __init__(
        self, urls: Sequence[str], seed: int = 0, *, resumes: bool = True, silence_s: float = PATIENCE_S
    ) -> None:
        """A connection on which nothing comes for `silence_s`, not even a comment, counts as broken."""
        self._urls = list(urls)
        self._silence_s = silence_s
        self._chance = random.Random(seed)
        self._resumes = resumes
        self.calls: list[Call] = []
        self.num_events = 0

    async def ask(self, path: str, body: dict[str, Any]) -> Call:
        """Until the answer is complete or lost; never raises for what a fault may do."""
        call = Call(path, body | {"stream": True})
        self.calls.append(call)
        key = secrets.token_hex(8)
        urls = itertools.cycle(self._chance.sample(self._urls, len(self._urls)))
        deadline = time.monotonic() + PATIENCE_S
        # A pool of connections per router would keep those that a kill has broken.
        timeout = httpx.Timeout(self._silence_s, connect=10.0)
        async with httpx.AsyncClient(timeout=timeout, trust_env=False) as http:
            while not call.is_complete and not call.problem:
                if time.monotonic() > deadline:
                    call.problem = "not complete in time"
                    break
                call.num_connections += 1
                try:
                    await self._connect(http, next(urls), call, key)
                except (httpx.TransportError, OSError):
                    await asyncio.sleep(0.0 if self._resumes else RETRY_S)
                    if not self._resumes and call.request_id is not None:
                        call.problem = "cut"
                else:
                    if not call.is_complete and not call.problem:
                        await asyncio.sleep(RETRY_S)
        return call

    async def _connect(self, http: httpx.AsyncClient, url: str, call: Call, key: str) -> None:
        headers = {"Headrace-Resumable": "true", "Idempotency-Key": key} if self._resumes else {}
        if call.request_id is not None and self._resumes:
            if call.last_event_id is not None:
                headers["Last-Event-ID"] = call.last_event_id
            request = http.build_request("GET", f"{url}/v1/requests/{call.request_id}", headers=headers)
        else:
            request = http.build_request("POST", url + call.path, json=call.body, headers=headers)
        reply = await http.send(request, stream=True)
        try:
            if reply.status_code != 200:
                told = (await reply.aread()).decode(errors="replace")
                call.refusals.append(f"{reply.status_code} {told[:200]}")
                if reply.status_code not in (429, 503):
                    call.problem = call.refusals[-1]
                return
            call.request_id = reply.headers.get("headrace-request-id", call.request_id or "?")
            event: list[str] = []
            async for line in reply.aiter_lines():
                if line:
                    event.append(line)
                    continue
                self._take(call, event)
                event.clear()
                if call.is_complete or call.problem:
                    return
            call.num_clean_cuts += 1
        finally:
            await reply.aclose()

    def _take(self, call: Call, event: list[str]) -> None:
        """An event counts, and so does its id, once the empty line behind it is here."""
        now = time.monotonic()
        data = [line.removeprefix("data: ") for line in event if line.startswith("data: ")]
        call.last_event_id = next(
            (line.removeprefix("id: ") for line in event if line.startswith("id: ")), call.last_event_id
        )
        for told in data:
            if told == "[DONE]":
                call.answer.num_done += 1
                continue
            num_deltas = len(call.answer.deltas)
            call.answer.add(json.loads(told))
            if call.answer.error is not None:
                call.problem = str(call.answer.error)
            if len(call.answer.deltas) > num_deltas:
                call.stalls_s.append(now - call.heard_at)
                self.num_events += 1
                call.heard_at = now
