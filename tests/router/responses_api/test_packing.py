"""What is large is packed and unpacked away from the event loop."""

import threading
from typing import Any

import pytest

from headrace_router.responses_api import packing, stored
from headrace_router.responses_api.stored import StoredResponse, pack


def response_of(size: int) -> StoredResponse:
    text = "".join(chr(0x4E00 + (number * 7919) % 20_000) for number in range(size))
    return StoredResponse(owner="o", response=pack({"id": text, "output": [{"id": 1}]}), items=pack([text]))


@pytest.mark.parametrize(("size", "is_aside"), [(10, False), (20_000, True)])
async def test_what_is_large_is_unpacked_in_a_thread(
    monkeypatch: pytest.MonkeyPatch, size: int, is_aside: bool
) -> None:
    threads = set()
    unpack = stored.unpack

    def watched(data: bytes) -> Any:
        threads.add(threading.current_thread())
        return unpack(data)

    monkeypatch.setattr(stored, "unpack", watched)
    response = response_of(size)
    for read, value in (
        (packing.object_of, response.object),
        (packing.input_items_of, response.input_items),
        (packing.conversation_of, response.conversation),
    ):
        threads.clear()
        assert await read(response) == value
        assert (threading.main_thread() not in threads) == is_aside


@pytest.mark.parametrize(("size", "is_aside"), [(10, False), (100_000, True)])
async def test_what_is_large_is_packed_in_a_thread(monkeypatch: pytest.MonkeyPatch, size: int, is_aside: bool) -> None:
    threads = set()

    def watched(value: Any) -> bytes:
        threads.add(threading.current_thread())
        return pack(value)

    monkeypatch.setattr(packing, "pack", watched)
    assert await packing.packed("x" * size, size) == pack("x" * size)
    assert (threading.main_thread() not in threads) == is_aside
