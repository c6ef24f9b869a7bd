"""The calls that this router has had of late: when what happened to them. No text of theirs. Pure: times are arguments,
monotonic seconds."""

from collections import OrderedDict, deque
from dataclasses import dataclass

from headrace_router.choices import Usage
from headrace_router.dashboard.frame import NUM_FIRST_TOKENS, REQUESTS_PER_S, TTFT_P50_S, TTFT_P99_S
from headrace_shared.messages import RequestId
from headrace_shared.quantiles import quantile

MAX_CALLS = 400
RECENT_S = 5.0
"""The figures of a router are about so many seconds."""
MAX_RECENT = 4096


@dataclass(slots=True)
class CallNote:
    request_id: RequestId
    owner: str
    """As in `Identity`: whom it is shown to."""
    model: str
    arrived_at: float
    queued_at: float | None = None
    first_token_at: float | None = None
    ended_at: float | None = None
    outcome: str = ""
    """Empty: it goes on."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0

    def end(self, now: float, outcome: str, usage: Usage) -> None:
        self.ended_at = now
        self.outcome = outcome
        self.prompt_tokens, self.output_tokens = usage.prompt_tokens, usage.completion_tokens
        self.cached_tokens = usage.cached_tokens


class Journal:
    def __init__(self) -> None:
        self._calls: OrderedDict[RequestId, CallNote] = OrderedDict()
        self._first_tokens: deque[tuple[float, float]] = deque(maxlen=MAX_RECENT)
        self._arrivals: deque[float] = deque(maxlen=MAX_RECENT)

    def begin(self, request_id: RequestId, owner: str, model: str, arrived_at: float) -> CallNote:
        note = CallNote(request_id, owner, model, arrived_at)
        self._calls[request_id] = note
        while len(self._calls) > MAX_CALLS:
            self._calls.popitem(last=False)
        self._arrivals.append(arrived_at)
        return note

    def first_token(self, note: CallNote, now: float) -> None:
        note.first_token_at = now
        self._first_tokens.append((now, now - note.arrived_at))

    def recent(self, owner: str, limit: int) -> list[CallNote]:
        """Newest first: at most `limit` that go on, and as many that have ended: neither crowds out the other."""
        own = [note for note in reversed(self._calls.values()) if note.owner == owner]
        running = [note for note in own if note.ended_at is None][:limit]
        ended = [note for note in own if note.ended_at is not None][:limit]
        return sorted([*running, *ended], key=lambda note: note.arrived_at, reverse=True)

    def get(self, request_id: RequestId, owner: str) -> CallNote | None:
        note = self._calls.get(request_id)
        return note if note is not None and note.owner == owner else None

    def gauges(self, now: float) -> dict[str, float]:
        """For Telemetry."""
        recent = [seconds for at, seconds in self._first_tokens if now - at <= RECENT_S]
        arrivals = sum(now - at <= RECENT_S for at in self._arrivals)
        gauges = {REQUESTS_PER_S: arrivals / RECENT_S, NUM_FIRST_TOKENS: float(len(recent))}
        if recent:
            gauges |= {TTFT_P50_S: quantile(recent, 0.5), TTFT_P99_S: quantile(recent, 0.99)}
        return gauges
