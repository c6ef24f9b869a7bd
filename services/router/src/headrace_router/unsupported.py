"""Parameters of OpenAI's API and its relatives that are known and not supported. Pure.

Where a parameter would change the answer, taking it silently would be a lie: only values that ask for nothing pass.
Parameters that are not known at all are none of our business and are accepted.
"""

from collections.abc import Mapping
from typing import Any

from headrace_shared.errors import InvalidRequest

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "function_call": ("none",),
    "functions": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "length_penalty": (1.0,),
    "modalities": (["text"],),
    "reasoning_effort": ("none",),  # not a chat's: there it is a field of its own
    "suffix": ("",),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}
"""Parameter -> values that change nothing. null never does."""

_KNOWN_AND_HARMLESS = frozenset({"best_of", "tools", "tool_choice", "parallel_tool_calls", "prediction"})


def refuse_unsupported(extra: Mapping[str, Any], *, num_choices: int | None) -> None:
    """Raises InvalidRequest naming the first parameter that asks for something we cannot do."""
    for name, value in extra.items():
        if name in _NEUTRAL and value is not None and not any(_same(value, neutral) for neutral in _NEUTRAL[name]):
            raise _unsupported(name)
    best_of = extra.get("best_of")
    if best_of is not None and not _same(best_of, num_choices or 1):
        raise InvalidRequest("'best_of' is supported only where it equals 'n'.", param="best_of", code=_CODE)
    choice = extra.get("tool_choice")  # not a chat's: there it is a field of its own
    if choice not in (None, "none", "auto"):
        raise _unsupported("tool_choice")
    if extra.get("tools") is not None and choice != "none":
        raise _unsupported("tools")


def unknown_fields(extra: Mapping[str, Any]) -> list[str]:
    """Fields that no API we know of has."""
    return [name for name in extra if name not in _NEUTRAL and name not in _KNOWN_AND_HARMLESS]


_CODE = "unsupported_parameter"


def _unsupported(name: str) -> InvalidRequest:
    return InvalidRequest(f"'{name}' is not supported.", param=name, code=_CODE)


def _same(value: Any, neutral: Any) -> bool:
    """True == 1 in Python, not in JSON."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
