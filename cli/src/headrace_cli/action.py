"""The words of a command that has actions: `headrace dead show ID …`, `headrace keys revoke KEY …`."""

from collections.abc import Sequence
from typing import NamedTuple


class Action(NamedTuple):
    name: str
    """Empty if there is none."""
    names: list[str]
    """What it is to be done to."""
    flags: list[str]


def read_action(argv: Sequence[str]) -> Action:
    """All words in front of the first flag; the rest is flags."""
    words = []
    for word in argv:
        if word.startswith("-"):
            break
        words.append(word)
    return Action(words[0] if words else "", words[1:], list(argv[len(words) :]))
