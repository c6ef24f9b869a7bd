"""Measures one HTTP call, from its arrival to the one outcome that it is counted under."""

import time
from typing import Protocol

from headrace_router.choices import Usage
from headrace_router.dashboard.journal import CallNote
from headrace_router.metrics import UNKNOWN, RouterMetrics
from headrace_router.models import ServedModel
from headrace_shared.aliases import ENGINE
from headrace_shared.errors import GRAMMAR_TOO_COMPLEX, InvalidRequest, ModelNotFound, Overloaded, RequestError
from headrace_shared.messages import RequestId
from headrace_shared.tally import Tally

CHAT = "chat"
COMPLETION = "text_completion"
EMBEDDINGS = "embeddings"
"""gen_ai.operation.name"""


class Asked(Protocol):
    """What is measured of a plan."""

    @property
    def model(self) -> ServedModel: ...

    @property
    def request_id(self) -> RequestId: ...

    @property
    def follows(self) -> bool: ...

    @property
    def num_choices(self) -> int: ...

    @property
    def max_tokens(self) -> int: ...


class CallMeter:
    def __init__(self, metrics: RouterMetrics, arrived_at: float) -> None:
        """`arrived_at`: monotonic."""
        self._metrics = metrics
        self._arrived_at = arrived_at
        self._model = UNKNOWN
        self._is_new = True
        self._token_gaps: Tally | None = None
        self._token_at = 0.0
        self._note: CallNote | None = None
        self.operation = CHAT
        self.first_token_s: float | None = None
        self.outcome = "cancelled"
        """finished, or a code."""
        self._ending = "cancelled"
        self._is_handed_over = False

    def hand_over(self) -> None:
        """Another meter goes on: this one counts nothing more."""
        self._is_handed_over = True

    def begun(self, asked: Asked, owner: str) -> None:
        """It is being carried out. Of what is continued, prompt and times were counted elsewhere."""
        metrics, model = self._metrics, asked.model.card.model
        self._model = model
        self._is_new = not asked.follows
        self._token_gaps = None
        self._note = None
        self.outcome = "cancelled"
        metrics.begun()
        if self._is_new:
            self._note = metrics.journal.begin(asked.request_id, owner, model, self._arrived_at)
            metrics.asked(model, asked.num_choices, asked.max_tokens)
            if asked.num_choices == 1:
                self._token_gaps = metrics.token_gaps.labels(model, ENGINE)

    def queued(self) -> None:
        if self._note is not None:
            self._note.queued_at = time.monotonic()

    def on_token(self) -> None:
        """Tokens have come."""
        now = time.monotonic()
        if self.first_token_s is None:
            self.first_token_s = now - self._arrived_at
            if self._is_new:
                self._metrics.first_token(self.operation, self._model, self.first_token_s)
            if self._note is not None:
                self._metrics.journal.first_token(self._note, now)
        elif self._token_gaps is not None:
            self._token_gaps.observe(now - self._token_at)
        self._token_at = now

    def ended(self, usage: Usage, num_told: int, *, was_cut_short: bool) -> None:
        """`num_told` of the answer's tokens were counted elsewhere; `was_cut_short`: a choice ended by its length."""
        outcome = self.outcome
        if self._note is not None:
            self._note.end(time.monotonic(), outcome, usage)
        if outcome == "finished":
            self._ending = "length" if was_cut_short else "stop"
        elif outcome in ("cancelled", "cut", "timeout"):
            self._ending = outcome
        else:
            self._ending = "error"
        if self._is_new:
            self._metrics.ended(self._model, outcome, usage)
            seconds = time.monotonic() - self._arrived_at
            error = "" if outcome == "finished" else outcome
            self._metrics.took(self.operation, self._model, error, seconds, self.first_token_s, usage)
        else:
            self._metrics.ended(self._model, outcome, Usage(0, max(0, usage.completion_tokens - num_told), 0))

    def close(self, error: RequestError | None) -> None:
        """The call is over; `error` is what its client was told instead of an answer, if it was."""
        if self._is_handed_over:
            return
        ending = self._ending
        had_begun = error is not None and error.code == GRAMMAR_TOO_COMPLEX
        if isinstance(error, InvalidRequest | ModelNotFound | Overloaded) and not had_begun:
            ending = "rejected"
        elif error is not None and ending == "cancelled":
            ending = "timeout" if error.code == "timeout" else "error"
        self._metrics.call_ended(self._model, ending)
