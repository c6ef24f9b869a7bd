"""Adapters into an engine that serves: what is asked for is answered, and under its number."""

import queue
from types import SimpleNamespace
from typing import Any

import pytest

from headrace_worker.adapters.config import AdapterRefused
from headrace_worker.adapters.loading import NOT_SERVED, put_in, start_reading
from headrace_worker.engine_frames import AdapterLoaded, LoadAdapter


class Adapters:
    def __contains__(self, digest: object) -> bool:
        return False

    def read(self, folder: str) -> Any:
        if folder == "broken":
            raise ValueError("what nobody foresaw")
        return SimpleNamespace(digest=folder)

    def add(self, adapter: Any) -> None:
        if adapter.digest == "large":
            raise AdapterRefused("no room")

    def drop(self, digest: str) -> None:
        """Nothing is kept."""


@pytest.mark.parametrize(
    ("adapters", "folder", "wanted", "answer"),
    [
        (Adapters(), "poet", "", ("poet", "")),
        (Adapters(), "poet", "poet", ("poet", "")),
        (Adapters(), "poet", "other", ("", "its files are not those that were loaded under this name")),
        (Adapters(), "large", "", ("large", "no room")),
        (Adapters(), "broken", "", ("", "it cannot be read: ValueError")),
        (None, "poet", "", ("", NOT_SERVED)),
    ],
)
def test_every_load_is_answered_under_its_number(
    adapters: Adapters | None, folder: str, wanted: str, answer: tuple[str, str]
) -> None:
    inbox: queue.Queue[Any] = queue.Queue()
    start_reading(LoadAdapter(name="a", folder=folder, digest=wanted, number=7), adapters, inbox)
    said = put_in(inbox.get(timeout=30), adapters)
    assert said == AdapterLoaded(name="a", digest=answer[0], problem=answer[1], number=7)
