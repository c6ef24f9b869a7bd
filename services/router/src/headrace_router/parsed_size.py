"""How much memory a parsed body takes, about. Pure."""

import sys
from typing import Any

from pydantic import BaseModel

_OTHER_BYTES = 32
"""Of a container, and of what is no text."""
_NUMBER_BYTES = 36
"""With its place in a list."""


def parsed_size(value: Any) -> int:
    """One letter outside of the usual planes makes a string four times as large as its text was in JSON."""
    num_bytes = 0
    left = [value]
    while left:
        value = left.pop()
        if isinstance(value, str):
            num_bytes += sys.getsizeof(value)
            continue
        num_bytes += _OTHER_BYTES
        if isinstance(value, BaseModel):
            value = vars(value) | (value.model_extra or {})
        if isinstance(value, dict):
            left.extend(value)
            value = list(value.values())
        if isinstance(value, list):
            if value and isinstance(value[0], int):  # by far the longest lists; looking at each would take longer
                num_bytes += _NUMBER_BYTES * len(value)
            else:
                left.extend(value)
    return num_bytes
