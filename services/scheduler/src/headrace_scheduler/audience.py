"""Whether somebody still waits for a request, by what routers say of themselves and of their clients. Pure."""

from collections.abc import Iterable

from headrace_shared.messages import Audience, Request, RequestId, RouterId

MAX_ROUTERS = 10_000
MAX_REQUESTS = 500_000


class Listeners:
    """Times are monotonic seconds."""

    def __init__(self, timeout_s: float, now: float) -> None:
        """Who was not heard of for `timeout_s` is not there."""
        self._timeout_s = timeout_s
        self._listening_since = now
        self._routers: dict[RouterId, float] = {}
        self._attached: dict[RequestId, float] = {}

    def begin(self, now: float) -> None:
        """Nothing could be heard until now: everybody gets the time again."""
        self._listening_since = now

    def on_router(self, router: RouterId, now: float) -> None:
        if router in self._routers or len(self._routers) < MAX_ROUTERS:
            self._routers[router] = now

    def on_attached(self, request_ids: Iterable[RequestId], now: float) -> None:
        for request_id in request_ids:
            if request_id in self._attached or len(self._attached) < MAX_REQUESTS:
                self._attached[request_id] = now

    def is_forsaken(self, request: Request, queued_at: float, now: float) -> bool:
        """`queued_at`: its router was there then."""
        match request.audience:
            case Audience.NONE:
                return False
            case Audience.ROUTER:
                heard_at = self._routers.get(request.router, queued_at)
            case Audience.ATTACHED:
                heard_at = self._attached.get(request.request_id, queued_at)
        return now - max(heard_at, queued_at, self._listening_since) > self._timeout_s

    def prune(self, now: float) -> None:
        """Forgets those who have been silent for long: without a word of theirs the verdict is the same."""
        oldest = now - 2 * self._timeout_s
        self._routers = {key: at for key, at in self._routers.items() if at >= oldest}
        self._attached = {key: at for key, at in self._attached.items() if at >= oldest}
