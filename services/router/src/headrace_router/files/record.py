"""A stored file as the broker's bucket has it, and how clients see it. Pure."""

import re
from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from msgspec import Struct

from headrace_router.files.answers import FileObject
from headrace_shared.errors import Forbidden, InvalidRequest

_FILE_ID = re.compile(r"file-[0-9a-f]{32}")

SHORTEST_LIFE_S = 3600
LONGEST_LIFE_S = 30 * 86_400


class FileState(StrEnum):
    UPLOADING = "uploading"
    READY = "ready"
    DELETING = "deleting"


class FileRecord(Struct, frozen=True, tag=True, kw_only=True):
    file_id: str
    owner: str
    """`owner_token` of whoever stored it."""
    filename: str
    purpose: str
    size: int
    """Bytes; while it is uploading, those that are reserved for it."""
    created_at: float
    """Seconds since the epoch. Those of the same second have an order too."""
    expires_at: int
    state: FileState
    give_up_at: int = 0
    """An upload that is not complete then never will be."""

    def is_visible(self, now: float) -> bool:
        return self.state is FileState.READY and now < self.expires_at

    def is_garbage(self, now: float) -> bool:
        """Nobody will ever see it again."""
        if self.state is FileState.UPLOADING:
            return now >= self.give_up_at
        return self.state is FileState.DELETING or now >= self.expires_at


class Quota(NamedTuple):
    """Of one tenant."""

    num_files: int
    num_bytes: int


class Counted(NamedTuple):
    record: FileRecord
    revision: int


def room_of(revision: int | None, all_files: Sequence[Counted], quota: Quota) -> int:
    """How many bytes a file may have, with those that were there before its own revision; None: it comes behind all.
    That order decides among files that come at the same time, so that all routers decide alike. Raises Forbidden if
    there is no room."""
    others = [other.record for other in all_files if revision is None or other.revision < revision]
    if len(others) >= quota.num_files:
        raise Forbidden(
            f"You may keep at most {quota.num_files} files; delete some.", code="file_quota_exceeded", param="file"
        )
    room = quota.num_bytes - sum(record.size for record in others)
    if room <= 0:
        raise Forbidden(
            f"Your files may have at most {quota.num_bytes} bytes in all; delete some.",
            code="file_quota_exceeded",
            param="file",
        )
    return room


def file_object(record: FileRecord) -> FileObject:
    return FileObject(
        id=record.file_id,
        bytes=record.size,
        created_at=int(record.created_at),
        expires_at=record.expires_at,
        filename=record.filename,
        purpose=record.purpose,
    )


def check_file_id(given: str) -> str:
    """Raises InvalidRequest (404): what does not look like one cannot exist."""
    if _FILE_ID.fullmatch(given) is None:
        raise file_not_found(given)
    return given


def file_not_found(given: str) -> InvalidRequest:
    return InvalidRequest(f"There is no file '{given[:64]}'.", param="file_id", code="file_not_found")


def life_s(fields: dict[str, str]) -> int:
    """From the form's `expires_after[anchor]` and `expires_after[seconds]`. Raises InvalidRequest."""
    seconds = fields.get("expires_after[seconds]")
    anchor = fields.get("expires_after[anchor]")
    if seconds is None and anchor is None:
        return LONGEST_LIFE_S
    if anchor != "created_at":
        raise InvalidRequest("'expires_after[anchor]' must be created_at.", param="expires_after[anchor]")
    given = int(seconds) if seconds is not None and re.fullmatch(r"[0-9]{1,10}", seconds) else -1
    if not SHORTEST_LIFE_S <= given <= LONGEST_LIFE_S:
        raise InvalidRequest(
            f"'expires_after[seconds]' must be from {SHORTEST_LIFE_S} to {LONGEST_LIFE_S}.",
            param="expires_after[seconds]",
        )
    return given
