"""One function call in JSON, read while it is written: {"name": "f", "arguments": {…}}. Pure."""

import json
from enum import Enum, auto
from typing import Any

MAX_HEAD_CHARS = 16 * 1024
"""An object is held back for so long at most, to see whether it is a call."""
_ARGUMENTS = ("arguments", "parameters")
_KEYS = frozenset({"name", "type", "id", *_ARGUMENTS})
"""With another key in front of the arguments it is some other object."""
_WHITE = " \t\r\n"
_decode = json.JSONDecoder().raw_decode


class ScanState(Enum):
    OPEN = auto()
    """It may be a call: nothing was given out."""
    CALL = auto()
    """It is one: `name` is known, and the arguments are given out as they are written."""
    DONE = auto()
    TEXT = auto()
    """It is none: `text` is all of it."""


class JsonEnd:
    """Where the object or list ends that is written piece by piece."""

    def __init__(self, depth: int = 0) -> None:
        """`depth`: how many were begun before."""
        self._depth = depth
        self._in_string = False
        self._is_escaped = False

    def push(self, text: str) -> int | None:
        """How much of the text belongs to it; None: all, and more is to come."""
        for index, char in enumerate(text):
            if self._is_escaped:
                self._is_escaped = False
            elif self._in_string:
                self._is_escaped = char == "\\"
                self._in_string = char != '"'
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return index + 1
        return None


class CallScanner:
    """Is given text that begins at the object's brace."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self.text = ""
        """Taken and not decided upon."""
        self._arguments = JsonEnd()
        self._object = JsonEnd(depth=1)
        self._is_behind_arguments = False
        self.name = ""
        self.state = ScanState.OPEN

    def push(self, text: str) -> tuple[str, str]:
        """(more of the arguments, what is behind the object); both empty once it is known to be text."""
        if self.state is ScanState.CALL:
            return self._take(text)
        self.text += text
        try:
            value, end = _decode(self.text)
        except (ValueError, RecursionError):
            start = self._find_arguments()
            if start is not None:
                self.state = ScanState.CALL
                text, self.text = self.text[start:], ""
                return self._take(text)
            if len(self.text) > MAX_HEAD_CHARS:
                self.state = ScanState.TEXT
            return "", ""
        if not isinstance(value, dict) or not self._take_name(value.get("name")):
            self.state = ScanState.TEXT
            return "", ""
        start = self._find_arguments()
        if self.state is ScanState.TEXT:
            return "", ""
        self.state = ScanState.CALL
        if start is None:
            rest, self.text = self.text[end:], ""
            self.state = ScanState.DONE
            return _written(next((value[key] for key in _ARGUMENTS if key in value), None)), rest
        text, self.text = self.text[start:], ""
        return self._take(text)

    def _find_arguments(self) -> int | None:
        """Where their brace is, behind the name. Finds out, too, that this can be no call."""
        position = 1
        while True:
            position = self._skip(position, _WHITE + ",")
            following = self.text[position : position + 1]
            if following != '"':
                if following not in ("", "}"):
                    self.state = ScanState.TEXT
                return None
            try:
                key, position = _decode(self.text, position)
            except ValueError:
                return None
            if key not in _KEYS:
                self.state = ScanState.TEXT
                return None
            position = self._skip(self._skip(position, _WHITE + ":"), _WHITE)
            if key in _ARGUMENTS and self.name and self.text[position : position + 1] == "{":
                return position
            try:
                value, position = _decode(self.text, position)
            except (ValueError, RecursionError):
                return None
            if key == "name" and position < len(self.text) and not self._take_name(value):
                self.state = ScanState.TEXT
                return None

    def _take_name(self, value: Any) -> bool:
        if isinstance(value, str) and value in self._names:
            self.name = value
            return True
        return False

    def _take(self, text: str) -> tuple[str, str]:
        """Up to the brace that ends the arguments, and then to that which ends the object."""
        arguments = ""
        if not self._is_behind_arguments:
            end = self._arguments.push(text)
            if end is None:
                return text, ""
            self._is_behind_arguments = True
            arguments, text = text[:end], text[end:]
        end = self._object.push(text)
        if end is None:
            return arguments, ""
        self.state = ScanState.DONE
        return arguments, text[end:]

    def _skip(self, position: int, chars: str) -> int:
        while position < len(self.text) and self.text[position] in chars:
            position += 1
        return position


def _written(arguments: Any) -> str:
    """Some models write them as a string, or leave them out."""
    if isinstance(arguments, str):
        return arguments
    return json.dumps({} if arguments is None else arguments, ensure_ascii=False)
