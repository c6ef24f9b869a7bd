"""What one tenant may have at once, whatever comes at the same moment."""

import asyncio

import pytest

from headrace_router.batches.desk import BatchDesk, DeskSettings
from headrace_router.batches.record import BatchRecord, taken
from headrace_router.batches.schemas import BatchBody
from headrace_router.batches.store import BatchStore
from headrace_router.identity import Identity
from headrace_router.owners import owner_token
from headrace_shared.errors import LimitReached
from tests.router.batches.world import OWNER, URL, World

LIMIT = 3


@pytest.mark.parametrize("is_taken_at_once", [False, True])
async def test_batches_made_at_the_same_moment_are_no_more_than_one_may_have(is_taken_at_once: bool) -> None:
    world = await World().open()
    draft = await world.library.begin(owner_token(OWNER), "in", 0, 100)
    await draft.write(b"{}")
    file = await world.library.finish(draft, "batch", 86_400)
    body = BatchBody.model_validate({"input_file_id": file.file_id, "endpoint": URL, "completion_window": "24h"})

    class Slow(BatchStore):
        async def create(self, record: BatchRecord) -> int:
            await asyncio.sleep(0.05)  # all have looked
            revision = await super().create(record)
            if is_taken_at_once:
                await self.change(record, lambda now: taken(now, 1, world.now))
            await asyncio.sleep(0.05)  # all are there
            return revision

    desk = BatchDesk(Slow(world.bus), world.library, [URL], DeskSettings(86_400.0, LIMIT), lambda: world.now)
    ends = await asyncio.gather(*(desk.create(Identity(OWNER), body, None) for _ in range(10)), return_exceptions=True)
    made = [end for end in ends if isinstance(end, BatchRecord)]
    assert all(isinstance(end, BatchRecord | LimitReached) for end in ends)
    kept = {record.batch_id for record in await world.store.all_of(OWNER)}
    assert kept == {record.batch_id for record in made}
    assert len(kept) <= LIMIT if is_taken_at_once else len(kept) == LIMIT
