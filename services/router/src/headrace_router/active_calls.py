"""The calls that this router is answering, by the ids that their clients know."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from headrace_router.call import Call, Plan
from headrace_router.generation import Generation


class ActiveCall(NamedTuple):
    plan: Plan
    generation: Generation


class ActiveCalls:
    def __init__(self) -> None:
        self._calls: dict[tuple[str, str], ActiveCall] = {}

    @contextmanager
    def add(self, call: Call, plan: Plan, generation: Generation) -> Iterator[None]:
        """While it is answered. A client's own id (X-Request-Id) means the latest call that had it."""
        active = ActiveCall(plan, generation)
        keys = [(call.identity.owner, name) for name in {plan.request_id, call.shown_id}]
        self._calls.update(dict.fromkeys(keys, active))
        try:
            yield
        finally:
            for key in keys:
                if self._calls.get(key) is active:
                    del self._calls[key]

    def find(self, owner: str, name: str) -> ActiveCall | None:
        """`name`: the request id, or the client's own."""
        return self._calls.get((owner, name))
