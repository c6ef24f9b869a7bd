"""What a client may tell the chat template beside messages and tools. Pure."""

from collections.abc import Mapping
from typing import Any

from headrace_router.call_limits import EFFORTS
from headrace_shared.errors import InvalidRequest


def template_variables(given: Mapping[str, Any] | None, effort: str | None) -> dict[str, Any]:
    """`effort`: of reasoning, under the names that templates know it by. What is given by name wins. Raises
    InvalidRequest."""
    variables: dict[str, Any] = {}
    if effort is not None:
        if effort not in EFFORTS:
            raise InvalidRequest(f"'reasoning_effort' must be one of {', '.join(EFFORTS)}.", param="reasoning_effort")
        thinks = effort != "none"
        variables = {"reasoning_effort": effort, "enable_thinking": thinks, "thinking": thinks}
    return variables | dict(given or {})
