"""As much of PromQL as it takes to see which metrics an expression names."""

import re

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_GROUPING = re.compile(r"\b(by|without|on|ignoring|group_left|group_right)\s*\([^()]*\)")
_NAME = re.compile(r"[A-Za-z_:][A-Za-z0-9_:]*")
_WORDS = frozenset({"and", "or", "unless", "bool", "offset", "inf", "nan"})
_PAIRS = {")": "(", "]": "[", "}": "{"}


def metric_names(expression: str) -> set[str]:
    """Raises ValueError for brackets that do not match and for an expression that names nothing."""
    text = _STRING.sub('""', expression)
    _check_brackets(text)
    text = re.sub(r"\{[^{}]*\}", " ", text)
    text = re.sub(r"\[[^\[\]]*\]", " ", text)
    text = _GROUPING.sub(" ", text)
    names = set()
    for found in _NAME.finditer(text):
        is_number = found.start() > 0 and text[found.start() - 1].isdigit()
        is_call = text[found.end() :].lstrip().startswith("(")
        if not is_number and not is_call and found.group().lower() not in _WORDS:
            names.add(found.group())
    if not names:
        raise ValueError(f"names no metric: {expression!r}")
    return names


def _check_brackets(text: str) -> None:
    open_brackets: list[str] = []
    for char in text:
        if char in _PAIRS.values():
            open_brackets.append(char)
        elif char in _PAIRS and (not open_brackets or open_brackets.pop() != _PAIRS[char]):
            raise ValueError(f"unmatched {char!r} in {text!r}")
    if open_brackets:
        raise ValueError(f"unmatched {open_brackets[-1]!r} in {text!r}")
