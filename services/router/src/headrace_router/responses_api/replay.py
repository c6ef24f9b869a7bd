"""The tokens of a response that has ended, as if they came once more."""

from collections.abc import Sequence
from typing import Any

from headrace_router.choices import ChoiceDelta, ChoiceText, Usage
from headrace_router.model_queue import Place
from headrace_router.token_log import single_tokens
from headrace_shared.errors import RequestError, ServiceFailure
from headrace_shared.messages import TokenFrame

BATCH_TOKENS = 128


class Replay:
    """Implements `answering.Source`."""

    def __init__(self, frames: Sequence[TokenFrame], choice: ChoiceText, response: dict[str, Any]) -> None:
        """`response`: the object as it is stored."""
        self._frames = [part for frame in frames for part in single_tokens(frame)]
        self._choice = choice
        usage = response["usage"] or {}
        self._usage = Usage(
            usage.get("input_tokens", 0),
            usage.get("output_tokens", 0),
            usage.get("input_tokens_details", {}).get("cached_tokens", 0),
        )
        self._failure = _failure_of(response)

    @property
    def is_complete(self) -> bool:
        return self._failure is None and (not self._frames or self._choice.finish is not None)

    @property
    def usage(self) -> Usage:
        return self._usage

    @property
    def place(self) -> Place | None:
        return None

    async def next(self, timeout_s: float) -> Sequence[ChoiceDelta]:
        """Raises RequestError where the response had ended with one."""
        now, self._frames = self._frames[:BATCH_TOKENS], self._frames[BATCH_TOKENS:]
        deltas = []
        for frame in now:
            if self._choice.finish is None:
                deltas.append(ChoiceDelta(0, self._choice.push(frame), frame.index + len(frame.tokens)))
        if not deltas and self._failure is not None:
            raise self._failure
        return deltas


def _failure_of(response: dict[str, Any]) -> RequestError | None:
    if response["status"] == "cancelled":
        return ServiceFailure("The response was cancelled.", code="cancelled")
    if response["status"] == "failed":
        error = response["error"] or {}
        return ServiceFailure(error.get("message", "The response failed."), code=error.get("code", "server_error"))
    return None
