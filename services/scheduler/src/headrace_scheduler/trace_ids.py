"""Which trace a request belongs to, for logs, which know requests by their ids only."""

from collections import OrderedDict

from headrace_shared.messages import Request, RequestId
from headrace_shared.tracing import trace_id_of

MAX_KNOWN = 8192
"""Of the latest requests: logs also tell of some that have just ended."""


class TraceIds:
    def __init__(self) -> None:
        self._known: OrderedDict[RequestId, str] = OrderedDict()

    def note(self, request: Request) -> None:
        trace_id = trace_id_of(request)
        if trace_id:
            self._known[request.request_id] = trace_id
            self._known.move_to_end(request.request_id)
            if len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)

    def find(self, request_id: str) -> str | None:
        return self._known.get(RequestId(request_id))
