"""Whatever is asked for, what reaches the engine is one of a few paths."""

import re

from hypothesis import example, given
from hypothesis import strategies as st

from headrace_autoscaler.proxy.routes import Refused, read_call

_NAME = "[A-Za-z0-9][A-Za-z0-9_.-]{0,127}"
_PASSED = re.compile(
    rf"(/v1\.[0-9]{{1,3}})?/(_ping|version|containers/(json|create|{_NAME}/(json|start|stop)|{_NAME}))(\?[!-~]*)?"
)
_PIECES = [
    "/",
    "..",
    "containers",
    "json",
    "create",
    "start",
    "exec",
    "v1.41",
    "?",
    "t=1",
    "%2e",
    "%2F",
    "#",
    ";",
    "a" * 64,
]
_TARGETS = st.one_of(st.text(), st.lists(st.sampled_from(_PIECES), max_size=10).map("".join))


@given(st.sampled_from(["GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "get", ""]), _TARGETS)
@example("GET", "/containers/../containers/json")
@example("POST", "/containers/create/../../build")
def test_what_passes_is_one_of_a_few_paths(method: str, target: str) -> None:
    try:
        call = read_call(method, target, 0, with_swarm=False)
    except Refused:
        return
    assert _PASSED.fullmatch(target), target
    assert ".." not in target.partition("?")[0].split("/")
    assert method in ("GET", "HEAD", "POST", "DELETE")
    assert re.fullmatch(_NAME + "|", call.subject)
