"""What became of one request: this router's own times, and what the schedulers' flight recordings tell of it."""

import re
import time
from collections.abc import Callable
from typing import Any

from headrace_router.dashboard.journal import CallNote, Journal
from headrace_router.dashboard.stories import Stories
from headrace_shared.errors import InvalidRequest
from headrace_shared.messages import RequestId

MAX_LISTED = 40
"""Of those that go on, and of those that have ended."""


class Inspector:
    """People see the calls that were made with their own credentials."""

    def __init__(self, journal: Journal, stories: Stories, now: Callable[[], float] = time.monotonic) -> None:
        self._journal = journal
        self._stories = stories
        self._now = now

    def recent(self, owner: str) -> dict[str, Any]:
        """Newest first."""
        notes = self._journal.recent(owner, MAX_LISTED)
        return {"requests": [self._told(note) for note in notes]}

    async def story(self, owner: str, request_id: str) -> dict[str, Any]:
        """Raises InvalidRequest if this router has had no such call of theirs lately."""
        wanted = RequestId(re.split("[-_]", request_id)[-1])  # answers are named chatcmpl-ID, cmpl-ID, resp_ID, msg_ID
        note = self._journal.get(wanted, owner)
        if note is None:
            raise InvalidRequest("This router has had no such request lately.", code="request_not_found")
        lines, problem = await self._stories.ask(note.request_id, note.model)
        return {
            "request": self._told(note),
            "story": [
                {
                    "at": line.at,
                    "scheduler": line.scheduler,
                    "kind": line.kind,
                    "text": line.text,
                    "worker": line.worker,
                }
                for line in lines
            ],
            "problem": problem,
        }

    def _told(self, note: CallNote) -> dict[str, Any]:
        """Times in seconds since the epoch."""
        offset = time.time() - self._now()

        def wall(at: float | None) -> float | None:
            return None if at is None else round(at + offset, 4)

        return {
            "id": note.request_id,
            "model": note.model,
            "outcome": note.outcome,
            "arrived_at": wall(note.arrived_at),
            "queued_at": wall(note.queued_at),
            "first_token_at": wall(note.first_token_at),
            "ended_at": wall(note.ended_at),
            "prompt_tokens": note.prompt_tokens,
            "cached_tokens": note.cached_tokens,
            "output_tokens": note.output_tokens,
        }
