"""Puts together what files and batches need."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fastapi import APIRouter

from headrace_router.accounts import Accounts
from headrace_router.batches.desk import BatchDesk, DeskSettings
from headrace_router.batches.execution import Answer, LineExecutor
from headrace_router.batches.journal import Journal
from headrace_router.batches.record import BatchRecord
from headrace_router.batches.routes import make_batches_router
from headrace_router.batches.run import Parts, RunSettings
from headrace_router.batches.runner import BatchRunner
from headrace_router.batches.store import BatchStore
from headrace_router.batches.turns import ActiveLimits
from headrace_router.calls import Caller
from headrace_router.files.library import FileLibrary, FileLimits
from headrace_router.files.record import Quota
from headrace_router.files.routes import make_files_router
from headrace_router.files.uploading import Uploads
from headrace_router.identity import Identity, known
from headrace_router.key_table import KeyTable
from headrace_router.metrics import RouterMetrics
from headrace_router.settings import RouterSettings
from headrace_shared.bus import Bus
from headrace_shared.errors import Unauthorized
from headrace_shared.messages import RouterId
from headrace_shared.subjects import BATCH_RESULTS


class Storage(NamedTuple):
    """/v1/files and /v1/batches."""

    runner: BatchRunner
    routers: Sequence[APIRouter]


async def open_storage(
    bus: Bus,
    router: RouterId,
    caller: Caller,
    endpoints: Mapping[str, Answer],
    keys: KeyTable,
    accounts: Accounts,
    metrics: RouterMetrics,
    settings: RouterSettings,
) -> Storage:
    """`endpoints`: where lines may go. Raises BusError."""
    quota = Quota(settings.file_quota_count, settings.file_quota_bytes)
    library = FileLibrary(bus, FileLimits(quota, settings.max_file_bytes, settings.upload_timeout_s))
    store, journal = BatchStore(bus), Journal(bus)
    await library.open()
    await store.open()
    await journal.open()

    def identify(record: BatchRecord) -> Identity:
        if not record.key_id and not keys.are_required:
            return Identity(record.owner)
        key = keys.get(record.key_id)
        if key is None:
            raise Unauthorized("The API key that the batch was made with is no longer valid.")
        return known(key)

    executor = LineExecutor(endpoints, metrics, caller.abort, caller.forget)
    max_result_bytes = (BATCH_RESULTS.max_bytes or 0) // settings.max_active_batches
    run_settings = RunSettings(settings.max_batch_lines, settings.batch_concurrency, max_result_bytes)
    parts = Parts(store, journal, library, executor, identify, accounts.leaves_half, run_settings)
    runner = BatchRunner(
        bus, router, parts, ActiveLimits(settings.max_active_batches, settings.max_active_batches_per_tenant)
    )
    await runner.open()
    metrics.batches_running.set_function(lambda: float(runner.num_running))
    desk_settings = DeskSettings(settings.batch_window_s, settings.max_unfinished_batches)
    desk = BatchDesk(store, library, executor.endpoints, desk_settings)
    uploads = Uploads(library, settings.body_timeout_s)
    return Storage(
        runner,
        (
            make_files_router(library, uploads, desk.check_unused),
            make_batches_router(desk, settings.body_timeout_s),
        ),
    )
