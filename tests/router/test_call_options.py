"""Headers that say how a call is to be made."""

import pytest
from starlette.datastructures import Headers

from headrace_router.call_options import CallOptions, read_options
from headrace_router.identity import anonymous
from headrace_shared.errors import InvalidRequest


def test_nothing_is_asked_for_by_default() -> None:
    assert read_options(Headers({"last-event-id": ""})) == CallOptions()


def test_all_of_them() -> None:
    headers = {"headrace-resumable": "True", "idempotency-key": "a b~", "headrace-timeout": "2.5", "last-event-id": "x"}
    assert read_options(Headers(headers)) == CallOptions(True, "a b~", 2.5, "x")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("Headrace-Resumable", "yes please"),
        ("Idempotency-Key", ""),
        ("Idempotency-Key", " x"),
        ("Idempotency-Key", "ä"),
        ("Idempotency-Key", "x" * 256),
        ("Headrace-Timeout", "soon"),
        ("Headrace-Timeout", "0"),
        ("Headrace-Timeout", "-1"),
        ("Headrace-Timeout", "nan"),
        ("Headrace-Timeout", "inf"),
        ("Headrace-Timeout", "1" * 33),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(name: str, value: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read_options(Headers({name.lower(): value}))
    assert refused.value.param == name


def test_owners_differ_by_their_credentials() -> None:
    owners = {anonymous(authorization).owner for authorization in ("", "Bearer a", "b")}
    assert len(owners) == 3 and not any("Bearer" in owner for owner in owners)
