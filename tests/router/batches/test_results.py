"""Results survive packing, each line has one, and files are in the documented shape."""

import json
import os
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_router.batches.results import (
    MAX_RESULT_BYTES,
    PART_BYTES,
    Gathered,
    LineResult,
    ResultGatherer,
    ResultPart,
    line_id,
    output_line,
    pack,
    unfinished,
    unpack,
)
from headrace_shared.codec import decode, encode
from headrace_shared.errors import ProtocolError


def result(number: int = 1, body: bytes = b'{"a":1}', status: int = 200) -> LineResult:
    return LineResult(number=number, custom_id=f"id-{number}", status=status, request_id="r", body=body)


@pytest.mark.parametrize("size", [0, 100, PART_BYTES, 3 * PART_BYTES])
def test_a_result_survives_packing(size: int) -> None:
    told = result(body=os.urandom(size))
    parts = [decode(encode(part), ResultPart) for part in pack(told, "w")]
    assert all(len(part.data) <= PART_BYTES for part in parts)
    assert unpack([part.data for part in parts]) == told


def test_what_is_too_large_or_damaged_is_no_result() -> None:
    with pytest.raises(ProtocolError):
        pack(result(body=bytes(MAX_RESULT_BYTES)), "w")
    data = pack(result(), "w")[0].data
    for wrong in ([data[:-3]], [b""], [b"x" + data], [data[:5], data]):
        with pytest.raises(ProtocolError):
            unpack(wrong)


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 4)), max_size=20), st.randoms(use_true_random=False))
def test_each_line_has_its_first_complete_result(written: list[tuple[int, int]], chance: random.Random) -> None:
    """Parts of several writers, mixed; some of them died before the last part."""
    streams = []
    for writer, (number, num_parts) in enumerate(written):
        kept = chance.randint(0, num_parts)
        streams.append(
            [
                ResultPart(
                    number=number,
                    writer=str(writer),
                    part=part,
                    num_parts=num_parts,
                    data=f"{writer}.{part} ".encode(),
                    is_good=writer % 2 == 0,
                )
                for part in range(kept)
            ]
        )
    gatherer = ResultGatherer()
    first: dict[int, int] = {}
    got: dict[int, Gathered] = {}
    left = {writer: list(parts) for writer, parts in enumerate(streams) if parts}
    while left:
        writer = chance.choice(sorted(left))
        part = left[writer].pop(0)
        if not left[writer]:
            del left[writer]
            if part.part == part.num_parts - 1:
                first.setdefault(part.number, writer)
        gathered = gatherer.feed(part)
        if gathered is not None:
            assert gathered.number not in got
            got[gathered.number] = gathered
    assert gatherer.done == set(got) == set(first)
    for number, writer in first.items():
        text = b"".join(f"{writer}.{part} ".encode() for part in range(written[writer][1]))
        assert b"".join(got[number].parts) == text and got[number].is_good is (writer % 2 == 0)


def test_incomplete_results_are_not_kept_for_ever() -> None:
    gatherer = ResultGatherer()
    for number in range(5000):
        gatherer.feed(ResultPart(number=number, writer="w", part=0, num_parts=2, data=b"x", is_good=True))
    assert len(gatherer._open) <= gatherer.MAX_OPEN
    for part in (-1, 2, 10**9):
        assert gatherer.feed(ResultPart(number=9, writer="w", part=part, num_parts=2, data=b"", is_good=True)) is None


def test_the_lines_of_the_files() -> None:
    good = output_line("batch_1", result(2))
    assert good.endswith(b"\n") and good.count(b"\n") == 1
    assert json.loads(good) == {
        "id": line_id("batch_1", 2),
        "custom_id": "id-2",
        "response": {"status_code": 200, "request_id": "r", "body": {"a": 1}},
        "error": None,
    }
    late = json.loads(output_line("batch_1", unfinished(3, "id-3", was_cancelled=False)))
    assert late["response"] is None and late["error"]["code"] == "batch_expired" and late["custom_id"] == "id-3"
    stopped = json.loads(output_line("batch_1", unfinished(3, "id-3", was_cancelled=True)))
    assert stopped["error"]["code"] == "batch_cancelled"
    assert result().is_good and not result(status=400).is_good
