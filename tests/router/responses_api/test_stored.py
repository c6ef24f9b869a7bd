"""What is kept of responses, and how it is listed."""

import pytest

from headrace_router.responses_api import stored as stored_responses
from headrace_router.responses_api.items import items_of
from headrace_router.responses_api.listing import page_of
from headrace_router.responses_api.store import request_id_of
from headrace_router.responses_api.stored import StoredResponse, pack, unpack
from headrace_shared.codec import decode, encode
from headrace_shared.errors import InvalidRequest, ProtocolError
from headrace_shared.messages import FinishReason, RequestId, TokenFrame

ITEMS = [{"id": f"msg_{number}", "type": "message"} for number in range(5)]


def test_a_stored_response_comes_back_as_it_was() -> None:
    items = items_of("Hi 🦉", "resp_1", [])
    output = [{"id": "msg_2", "type": "message", "role": "assistant", "content": [], "status": "completed"}]
    frame = TokenFrame(
        request_id=RequestId("1" * 32), choice=0, attempt=0, index=0, tokens=(1, 2), finish=FinishReason.STOP
    )
    response = {"id": "resp_1", "status": "completed", "output": output}
    stored = StoredResponse(owner="o", response=pack(response), items=pack(items), answer=(frame,))
    again = decode(encode(stored), StoredResponse)
    assert again == stored and again.object == response and again.input_items == items
    assert again.conversation == items + output


def test_what_is_packed_can_be_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_responses, "MAX_BYTES", 100)
    assert unpack(pack("x" * 98)) == "x" * 98
    with pytest.raises(ProtocolError):
        pack("x" * 99)


@pytest.mark.parametrize("data", [b"", b"abc", pack([1])[:-3], b"\x00" * 100])
def test_what_cannot_be_read_is_no_response(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        unpack(data)


def test_what_would_unpack_to_very_much_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace_router.responses_api.stored.MAX_BYTES", 1000)
    with pytest.raises(ProtocolError):
        unpack(pack("x" * 10_000))


@pytest.mark.parametrize("text", ["", "resp_", "resp_" + "g" * 32, "1" * 32, "resp_" + "1" * 31, "resp_" + "A" * 32])
def test_ids_that_are_none_of_ours(text: str) -> None:
    assert request_id_of(text) is None


def test_pages() -> None:
    first = page_of(ITEMS, "asc", None, 2)
    assert [item["id"] for item in first["data"]] == ["msg_0", "msg_1"] and first["has_more"]
    assert (first["first_id"], first["last_id"], first["object"]) == ("msg_0", "msg_1", "list")
    last = page_of(ITEMS, "asc", "msg_3", 2)
    assert [item["id"] for item in last["data"]] == ["msg_4"] and not last["has_more"]
    newest = page_of(ITEMS, "desc", None, 100)
    assert [item["id"] for item in newest["data"]] == [f"msg_{number}" for number in (4, 3, 2, 1, 0)]
    assert page_of(ITEMS, "desc", "msg_0", 5)["data"] == [] and page_of([], "asc", None, 1)["first_id"] is None
    with pytest.raises(InvalidRequest):
        page_of(ITEMS, "asc", "msg_9", 2)
