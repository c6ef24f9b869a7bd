"""Who has room for a file, and when a file is gone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from headrace_router.files.record import Counted, FileRecord, FileState, Quota, life_s, room_of
from headrace_shared.errors import Forbidden, InvalidRequest

RECORD = FileRecord(
    file_id="file-1",
    owner="o",
    filename="f",
    purpose="batch",
    size=10,
    created_at=100,
    expires_at=200,
    state=FileState.READY,
    give_up_at=150,
)


def test_a_file_is_seen_while_it_is_ready_and_not_expired() -> None:
    assert RECORD.is_visible(199.0) and not RECORD.is_garbage(199.0)
    assert not RECORD.is_visible(200.0) and RECORD.is_garbage(200.0)
    uploading = replace(RECORD, state=FileState.UPLOADING)
    assert not uploading.is_visible(101.0) and not uploading.is_garbage(149.0) and uploading.is_garbage(150.0)
    deleting = replace(RECORD, state=FileState.DELETING)
    assert not deleting.is_visible(101.0) and deleting.is_garbage(101.0)


@given(st.lists(st.integers(0, 120), max_size=12))
def test_files_that_come_at_the_same_time_never_exceed_the_quota(sizes: list[int]) -> None:
    """Each sees those that were created before it, and some that came later."""
    quota = Quota(num_files=5, num_bytes=300)
    counted = [Counted(replace(RECORD, size=size), revision) for revision, size in enumerate(sizes, 1)]
    kept: list[int] = []
    there = list(counted)
    for own in counted:
        try:
            room = room_of(own.revision, there[::-1], quota)
        except Forbidden as error:
            assert error.code == "file_quota_exceeded"
            there.remove(own)
            continue
        if own.record.size > room:
            there.remove(own)
        else:
            kept.append(own.record.size)
    assert len(kept) <= 5 and sum(kept) <= 300


def test_a_file_that_comes_later_takes_no_room() -> None:
    own, later = Counted(RECORD, 1), Counted(replace(RECORD, size=1000), 2)
    assert room_of(own.revision, [later, own], Quota(1, 50)) == 50
    for revision in (later.revision, None):
        with pytest.raises(Forbidden):
            room_of(revision, [later, own], Quota(1, 50))


def test_lives() -> None:
    assert life_s({}) == 30 * 86_400
    assert life_s({"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}) == 3600
    for fields in (
        {"expires_after[seconds]": "3600"},
        {"expires_after[anchor]": "created_at"},
        {"expires_after[anchor]": "x", "expires_after[seconds]": "3600"},
        *({"expires_after[anchor]": "created_at", "expires_after[seconds]": s} for s in ("", "1", "-5", "1e9", "³")),
    ):
        with pytest.raises(InvalidRequest):
            life_s(fields)
