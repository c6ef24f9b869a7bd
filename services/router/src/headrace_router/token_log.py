"""The order of one choice's tokens: each index once, whatever the broker repeats, loses or delays. Pure."""

from collections.abc import Sequence
from enum import Enum, auto

import msgspec

from headrace_shared.messages import TokenFrame


class Verdict(Enum):
    NEXT = auto()
    """The frame continues the choice."""
    OLD = auto()
    """Seen before, or of an attempt that has been given up."""
    GAP = auto()
    """Something before it is missing."""


class Cursor:
    """How far one choice has been read."""

    def __init__(self, first: int = 0) -> None:
        """`first`: index of the first token that comes; below 0 where the prompt's are told too."""
        self.next_index = first
        self.attempt = 0
        self.is_finished = False

    def judge(self, frame: TokenFrame) -> Verdict:
        if self.is_finished or frame.attempt < self.attempt:
            return Verdict.OLD
        if frame.index > self.next_index:
            return Verdict.GAP
        end = frame.index + len(frame.tokens)
        is_news = end > self.next_index or (end == self.next_index and frame.finish is not None)
        return Verdict.NEXT if is_news else Verdict.OLD

    def advance(self, frame: TokenFrame) -> TokenFrame:
        """The new part of a frame judged NEXT."""
        fresh = _slice(frame, self.next_index, frame.index + len(frame.tokens))
        self.attempt = max(self.attempt, frame.attempt)
        self.next_index += len(fresh.tokens)
        self.is_finished = fresh.finish is not None
        return fresh

    def repair(self, logged: Sequence[TokenFrame]) -> list[TokenFrame]:
        """What the log holds beyond this point. At each index the highest attempt counts: an attempt begins where the
        scheduler knew all tokens before, so those come from earlier ones."""
        fresh: list[TokenFrame] = []
        while not self.is_finished:
            covering = [frame for frame in logged if self._covers(frame)]
            if not covering:
                break
            best = max(covering, key=lambda frame: frame.attempt)
            later = [f.index for f in logged if f.attempt > best.attempt and f.index > self.next_index]
            end = best.index + len(best.tokens)
            part = _slice(best, self.next_index, min([end, *later]))
            self.attempt = max(self.attempt, best.attempt)
            self.next_index += len(part.tokens)
            self.is_finished = part.finish is not None
            fresh.append(part)
        return fresh

    def _covers(self, frame: TokenFrame) -> bool:
        end = frame.index + len(frame.tokens)
        return frame.index <= self.next_index and (
            end > self.next_index or (end == self.next_index and frame.finish is not None)
        )


def split_frame(frame: TokenFrame, index: int) -> list[TokenFrame]:
    """The frame, in two if it goes beyond that index."""
    end = frame.index + len(frame.tokens)
    if not frame.index < index < end:
        return [frame]
    return [_slice(frame, frame.index, index), _slice(frame, index, end)]


def single_tokens(frame: TokenFrame) -> list[TokenFrame]:
    """The frame, cut into frames of one token. One without tokens stays as it is."""
    if len(frame.tokens) <= 1:
        return [frame]
    return [_slice(frame, index, index + 1) for index in range(frame.index, frame.index + len(frame.tokens))]


def _slice(frame: TokenFrame, start: int, end: int) -> TokenFrame:
    """The part of the frame at indices [start, end)."""
    first, last = start - frame.index, end - frame.index
    if first == 0 and last == len(frame.tokens):
        return frame
    return msgspec.structs.replace(
        frame,
        index=start,
        tokens=frame.tokens[first:last],
        logprobs=frame.logprobs[first:last],
        finish=frame.finish if last == len(frame.tokens) else None,
    )
