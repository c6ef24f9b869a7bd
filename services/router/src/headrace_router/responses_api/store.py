"""The bucket of stored responses, and the list of those without an end."""

import asyncio
import time
from typing import NamedTuple

import structlog

from headrace_router.responses_api.packing import object_of
from headrace_router.responses_api.response_object import PREFIX
from headrace_router.responses_api.share_book import ShareBook
from headrace_router.responses_api.stored import StoredResponse, Unfinished
from headrace_shared.bus import Bus, Entry, WatchHandler
from headrace_shared.codec import decode, encode
from headrace_shared.errors import BusUnavailable, Forbidden, InvalidRequest, ProtocolError, RevisionConflict
from headrace_shared.messages import RequestId
from headrace_shared.subjects import RESPONSES, UNFINISHED

log = structlog.get_logger(__name__)

LAG_S = 0.1
"""A broker of a cluster may answer before it knows what another one has stored."""

MAX_ATTEMPTS = 8
"""Of a deletion. Each failure means that the response has changed."""

OWNERS = 8
"""So many must be at their limit before nobody's responses can be stored any more."""


class Found(NamedTuple):
    stored: StoredResponse
    revision: int


class ResponseStore:
    """All of it raises BusError."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._shares = ShareBook(bus, RESPONSES.max_bytes // OWNERS)

    async def open(self, on_unfinished: WatchHandler) -> None:
        """`on_unfinished` hears of all responses without an end, now and later."""
        for bucket in (RESPONSES, UNFINISHED):
            await self._bus.ensure_bucket(bucket)
        await self._shares.open()
        await self._bus.watch(UNFINISHED.name, on_unfinished)

    async def run(self) -> None:
        """Until cancelled."""
        await self._shares.run()

    async def close(self) -> None:
        await self._shares.close()

    @property
    def max_items_bytes(self) -> int:
        """Of a packed conversation that is stored: it leaves as much for the answer."""
        return self._bus.max_payload // 2

    async def load(self, owner: str, response_id: str, param: str | None = None) -> Found:
        """Raises InvalidRequest if there is none, or it is somebody else's. `param`: the field that names it."""
        request_id = request_id_of(response_id)
        found = None
        if request_id is not None:
            found = await self.find_surely(request_id)
        if found is None or found.stored.owner != owner:
            raise InvalidRequest(
                f"There is no response with the id '{response_id[:64]}', or not any more.",
                param=param,
                code="response_not_found" if param is None else "previous_response_not_found",
            )
        return found

    async def find_surely(self, request_id: RequestId) -> Found | None:
        """Looks twice."""
        found = await self.find(request_id)
        if found is None:
            await asyncio.sleep(LAG_S)
            found = await self.find(request_id)
        return found

    async def find(self, request_id: RequestId) -> Found | None:
        entry = await self._bus.get(RESPONSES.name, request_id)
        if entry is None:
            return None
        try:
            found = Found(decode(entry.value, StoredResponse), entry.revision)
            return None if found.stored.is_deleted else found
        except ProtocolError as error:
            log.warning("undecodable stored response", request_id=request_id, error=str(error))
            return None

    def check_share(self, owner: str, num_bytes: int) -> None:
        """Raises Forbidden if the owner may not store so much more."""
        if not self._shares.has_room(owner, num_bytes):
            raise Forbidden(
                "You may store no more responses; delete some.", code="response_quota_exceeded", param="store"
            )

    async def put(self, request_id: RequestId, stored: StoredResponse) -> None:
        """Unless it was deleted."""
        data = encode(stored)
        try:
            await self._bus.create(RESPONSES.name, request_id, data)
        except RevisionConflict:
            # Its call was repeated, with the same idempotency key.
            found = await self.find(request_id)
            if found is not None:
                await self._bus.put(RESPONSES.name, request_id, data)
            return
        self._shares.fill(stored.owner, len(data))

    async def create(self, request_id: RequestId, stored: StoredResponse) -> int:
        """Raises RevisionConflict if there is one, Forbidden if its owner has stored too much."""
        data = encode(stored)
        self.check_share(stored.owner, len(data))
        # Before the answer comes: else many at the same time would get in.
        began_at = time.time()
        self._shares.fill(stored.owner, len(data))
        try:
            return await self._bus.create(RESPONSES.name, request_id, data)
        except BaseException:
            self._shares.free(stored.owner, len(data), began_at)
            raise

    async def update(self, request_id: RequestId, stored: StoredResponse, revision: int) -> int:
        """Raises RevisionConflict if it has changed, or is gone."""
        data = encode(stored)
        revision = await self._bus.update(RESPONSES.name, request_id, data, revision)
        # It takes the place of the one without an answer, which had at least the same items.
        self._shares.fill(stored.owner, max(0, len(data) - len(stored.items)))
        return revision

    async def delete(self, request_id: RequestId) -> None:
        """Leaves a mark, so that repeating its call does not bring it back. No error if there is none."""
        mark = encode(StoredResponse(owner="", response=b"", items=b""))
        for _ in range(MAX_ATTEMPTS):
            found = await self.find(request_id)
            if found is None:
                return
            try:
                await self._bus.update(RESPONSES.name, request_id, mark, found.revision)
            except RevisionConflict:
                # It ended just now, or somebody else deletes it: it makes room once.
                await asyncio.sleep(LAG_S)
                continue
            self._shares.free(found.stored.owner, len(encode(found.stored)), await _created(found.stored))
            return
        raise BusUnavailable("the response keeps changing")

    async def add_unfinished(self, request_id: RequestId, router: str) -> None:
        await self._bus.put(UNFINISHED.name, request_id, encode(Unfinished(router=router)))

    async def unfinished(self, request_id: RequestId) -> Entry | None:
        return await self._bus.get(UNFINISHED.name, request_id)

    async def take_over(self, request_id: RequestId, router: str, revision: int) -> None:
        """Raises RevisionConflict if somebody else was quicker."""
        await self._bus.update(UNFINISHED.name, request_id, encode(Unfinished(router=router)), revision)

    async def remove_unfinished(self, request_id: RequestId) -> None:
        await self._bus.remove(UNFINISHED.name, request_id)


async def _created(stored: StoredResponse) -> float:
    """Seconds since the epoch; now, if that cannot be read any more."""
    try:
        return float((await object_of(stored))["created_at"])
    except ProtocolError:
        return time.time()


def request_id_of(response_id: str) -> RequestId | None:
    """None if no response of ours can have this id."""
    text = response_id.removeprefix(PREFIX)
    is_ours = response_id.startswith(PREFIX) and len(text) == 32 and all(char in "0123456789abcdef" for char in text)
    return RequestId(text) if is_ours else None
