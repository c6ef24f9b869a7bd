"""Errors in the words of the API that was asked. Pure.

Some APIs are translated to chat completions; what is wrong is then found in the translation, under the names of its
fields.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from headrace_shared.errors import InvalidRequest


class FieldName(NamedTuple):
    ours: str
    theirs: str


@contextmanager
def in_words_of(names: Sequence[FieldName]) -> Iterator[None]:
    """Renames what an InvalidRequest of the block complains of."""
    try:
        yield
    except InvalidRequest as error:
        raise renamed(error, names) from error


def renamed(error: InvalidRequest, names: Sequence[FieldName]) -> InvalidRequest:
    """The first name that the error's parameter begins with counts."""
    param = error.param
    if param is None:
        return error
    message = error.message
    if param.startswith("tools["):
        param, message = param.replace(".function.", "."), message.replace(".function.", ".")
    for name in names:
        rest = param[len(name.ours) :]
        if param.startswith(name.ours) and (not rest or rest[0] in ".["):
            param = name.theirs + rest
            break
    # Behind a wrong type or value stands what may be there, in quotes, too: a role is not a field of its name.
    told, colon, allowed = message.partition(": ") if message.startswith("Invalid '") else (message, "", "")
    for name in names:
        for end in ("'", ".", "["):
            told = told.replace(f"'{name.ours}{end}", f"'{name.theirs}{end}")
    return InvalidRequest(told + colon + allowed, param=param, code=error.code)
