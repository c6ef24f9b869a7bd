"""The text of one choice: tokens in, deltas out. Pure.

Streamed and whole answers take this same way, so they cannot differ.
"""

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from headrace_router.detokenization import Detokenizer, Vocabulary
from headrace_router.stop_strings import StopStrings
from headrace_shared.messages import FinishReason, TokenFrame, TokenLogprobs


class TokenText(NamedTuple):
    """One token of the answer with its log-probabilities."""

    token: int
    start: int
    """Where its text begins in the choice's text, in characters."""
    logprobs: TokenLogprobs | None
    """None: of a prompt's first token, which follows nothing."""


class Delta(NamedTuple):
    """What a choice has gained."""

    text: str = ""
    tokens: tuple[TokenText, ...] = ()
    """Only where log-probabilities were asked for; those of a text that is held back come with that text."""
    finish: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string, or the stop token that is no end-of-sequence token of the model."""
    token_ids: tuple[int, ...] = ()
    """Only where they were asked for; those of a text that is held back too."""
    embedding: bytes = b""
    """As in `TokenFrame`."""


class Usage(NamedTuple):
    """Of a whole call."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class ChoiceDelta(NamedTuple):
    choice: int
    """prompt index x choices + choice"""
    delta: Delta
    num_tokens: int = 0
    """Tokens of the choice, up to and with this delta's."""
    usage: Usage | None = None
    """As it was then, where that was asked for."""

    def then(self, later: "ChoiceDelta") -> "ChoiceDelta":
        """This one and the choice's next one in one piece."""
        delta, next_delta = self.delta, later.delta
        return later._replace(
            delta=next_delta._replace(
                text=delta.text + next_delta.text,
                tokens=delta.tokens + next_delta.tokens,
                token_ids=delta.token_ids + next_delta.token_ids,
            )
        )


class ChoiceText:
    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        skip_special: bool = True,
        stops: tuple[str, ...] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
        eos_token_ids: Iterable[int] = (),
        keeps_ids: bool = False,
        is_empty: bool = False,
        scores_end: bool = False,
    ) -> None:
        """`keeps_ids`: deltas have the tokens. `is_empty`: none was asked for, and the one that comes counts for
        nothing. `scores_end`: a stop token has its log-probability told, though it is not shown."""
        self._detokenizer = Detokenizer(vocabulary, skip_special=skip_special)
        self._stops = StopStrings(stops, include=include_stop)
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._eos_token_ids = frozenset(eos_token_ids)
        self._keeps_ids = keeps_ids
        self._is_empty = is_empty
        self._scores_end = scores_end
        self._ids: list[int] = []
        self._num_chars = 0
        self._num_shown = 0
        self._waiting: deque[tuple[TokenText, int]] = deque()
        self.num_tokens = 0
        """Generated tokens that count: stop tokens do, tokens behind a stop string do not."""
        self.finish: FinishReason | None = None

    def push(self, frame: TokenFrame) -> Delta:
        """The next frame, without gaps and repetitions."""
        if self._is_empty:
            self.finish = FinishReason.LENGTH
            return Delta(finish=self.finish)
        shown = ""
        stop_reason: str | int | None = None
        last = len(frame.tokens) - 1
        for i, token in enumerate(frame.tokens):
            self.num_tokens += 1
            if self._keeps_ids:
                self._ids.append(token)
            if i == last and frame.finish is FinishReason.STOP:
                stop_reason = None if token in self._eos_token_ids else token
                if not self._include_stop:
                    if frame.logprobs and self._scores_end:
                        shown_end = TokenText(token, self._num_chars, frame.logprobs[i])
                        self._waiting.append((shown_end, self._num_chars))
                    break
            start = self._num_chars
            text = self._detokenizer.push(token)
            self._num_chars += len(text)
            if frame.logprobs:
                # A part of a character waits for all of it, which may be a stop string.
                shown_at = self._num_chars + self._detokenizer.is_inside
                self._waiting.append((TokenText(token, start, frame.logprobs[i]), shown_at))
            # Text that min_tokens forces is no place for a stop string to begin.
            shown += text if self.num_tokens <= self._min_tokens else self._stops.push(text)
            if self._stops.matched is not None:
                return self._end(shown, FinishReason.STOP, self._stops.matched)
        if frame.finish is None:
            return self._delta(shown)
        tail = self._detokenizer.flush()
        self._num_chars += len(tail)
        shown += self._stops.push(tail)
        if self._stops.matched is not None:
            return self._end(shown, FinishReason.STOP, self._stops.matched)
        return self._end(shown + self._stops.release(), frame.finish, stop_reason)

    def _delta(self, shown: str) -> Delta:
        self._num_shown += len(shown)
        ready = []
        while self._waiting and self._waiting[0][1] <= self._num_shown:
            ready.append(self._waiting.popleft()[0])
        return Delta(shown, tuple(ready), token_ids=self._take_ids())

    def _end(self, shown: str, finish: FinishReason, stop_reason: str | int | None) -> Delta:
        self.finish = finish
        self._num_shown += len(shown)
        is_cut = self._stops.matched is not None
        # A token belongs to the answer if any of its text does.
        ready = tuple(token for token, _ in self._waiting if not is_cut or token.start < self._num_shown)
        self._waiting.clear()
        return Delta(shown, ready, finish, stop_reason, self._take_ids())

    def _take_ids(self) -> tuple[int, ...]:
        ids = tuple(self._ids)
        self._ids.clear()
        return ids
