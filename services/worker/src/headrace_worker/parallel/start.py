"""Starts the engine of a worker that is all on this machine: one process, or one for each rank."""

from headrace_worker.engine_link import EngineLink
from headrace_worker.parallel.local_group import start_local_group
from headrace_worker.parallel.rank_group import RankGroup
from headrace_worker.settings import WorkerSettings


async def start_engine(settings: WorkerSettings) -> EngineLink | RankGroup:
    if settings.tensor_parallel * settings.pipeline_parallel == 1:
        return await EngineLink.start(settings.engine_module)
    return await start_local_group(
        settings.engine_module, settings.tensor_parallel, settings.pipeline_parallel, settings.hang_timeout_s
    )
