"""Lists in pages: nothing is left out, nothing is there twice."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_router.paging import PageQuery, page, read_query
from headrace_shared.errors import InvalidRequest


@given(st.integers(0, 30), st.integers(1, 12), st.sampled_from(["asc", "desc"]))
def test_all_pages_together_are_the_list(count: int, limit: int, order: str) -> None:
    ids = [str(number) for number in range(count)]
    after, seen = "", []
    while True:
        query = read_query({"limit": str(limit), "order": order, "after": after}, 20, 100)
        told = page(ids, query, str, lambda item: {"id": item})
        got = [item["id"] for item in told["data"]]
        assert len(got) <= limit
        assert (told["first_id"], told["last_id"]) == ((got[0], got[-1]) if got else (None, None))
        seen += got
        if not told["has_more"]:
            break
        after = got[-1]
    assert seen == (ids if order == "desc" else ids[::-1])


def test_queries() -> None:
    assert read_query({}, 20, 100) == PageQuery(20, None, "desc")
    for query, param in (
        ({"limit": "0"}, "limit"),
        ({"limit": "101"}, "limit"),
        ({"limit": "-1"}, "limit"),
        ({"limit": "x"}, "limit"),
        ({"limit": "²"}, "limit"),
        ({"order": "up"}, "order"),
    ):
        with pytest.raises(InvalidRequest) as caught:
            read_query(query, 20, 100)
        assert caught.value.param == param
    with pytest.raises(InvalidRequest) as caught:
        page(["a"], PageQuery(1, "b"), str, lambda item: {})
    assert caught.value.param == "after"
