"""A node other than the first of a worker that is spread over machines: lends its devices to the worker that node 0 is.

    waiting -> running -> (draining ->) leaving

It joins the leader's epoch, runs its ranks until the leader ends the group, and waits for the next epoch. When a rank
or the leader is lost it exits non-zero, as a worker does whose engine is lost.
"""

import asyncio
import secrets
import time
from collections.abc import Callable, Coroutine
from typing import Any

import structlog
from msgspec.structs import replace

from headrace_shared.bus import Bus
from headrace_shared.errors import ConfigError, HeadraceError
from headrace_shared.model_cards import served_name
from headrace_shared.service import Service
from headrace_shared.tasks import done_before, end
from headrace_worker.config import EngineConfig
from headrace_worker.engine_frames import Load, Refused
from headrace_worker.parallel.address import address_toward, interface_environ
from headrace_worker.parallel.layout import check_nodes, local_places
from headrace_worker.parallel.presence import CHECK_S, Presence
from headrace_worker.parallel.rank_group import RankGroup
from headrace_worker.parallel.rendezvous import LeaderRecord, MemberRecord, NodeState
from headrace_worker.settings import WorkerSettings

LAST_WORD_S = 3.0
"""For the leader's record to say that the ranks' end was meant."""

log = structlog.get_logger(__name__)


class GroupLost(HeadraceError):
    def __init__(self, problem: str) -> None:
        super().__init__(f"the group of nodes is lost: {problem}")


class MemberService:
    """One process on a connected bus. `run` returns when it was told to stop and the leader has drained."""

    def __init__(
        self, service: Service, bus: Bus, settings: WorkerSettings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Raises ConfigError."""
        # How many ranks there are is the leader's to say.
        check_nodes(settings.num_nodes, settings.num_nodes, settings.node_rank, settings.group)
        self._service = service
        self._bus = bus
        self._settings = settings
        self._presence = Presence(bus, settings.group, settings.node_rank, settings.load_timeout_s, clock)
        self._host = settings.group_host or address_toward(settings.nats_url)
        self._model = settings.served_name or served_name(settings.model)
        self._state = "waiting"
        self._is_present = False
        self._epoch = 0
        """The last one that it has joined."""

    async def run(self) -> None:
        """Raises ConfigError if a rank cannot serve what is configured, RankLost or GroupLost if a rank or the leader
        is lost."""
        self._service.spawn(self._service.report(self._bus, lambda: self._state, lambda: {}, self._model), "telemetry")
        self._service.set_ready(lambda: None if self._state == "running" else self._state)
        await self._presence.open()
        reason = ""
        try:
            while (leader := await self._unless_draining(self._join())) is not None:
                self._state = "running"
                await self._lend(leader)
                self._state = "waiting"
        except HeadraceError as error:
            reason = str(error)
            raise
        except asyncio.CancelledError:
            reason = "it was stopped"
            raise
        finally:
            self._state = "leaving"
            await self._presence.close(reason)

    async def _join(self) -> LeaderRecord:
        """Returns when a leader has all nodes of its epoch, this one among them."""
        view = self._presence.view
        while True:
            log.info("waiting for node 0", group=self._settings.group, after_epoch=self._epoch)
            while (leader := view.leader_to_join(self._epoch, self._presence.now)) is None:
                await self._wait()
            if leader.num_nodes != self._settings.num_nodes:
                raise ConfigError(
                    "num_nodes", f"{self._settings.num_nodes} here, but {leader.num_nodes} on node 0 of the group"
                )
            await self._present(leader.epoch)
            log.info("joined", group=self._settings.group, epoch=leader.epoch, leader=leader.host)
            while view.lost_leader(leader, self._presence.now) is None:
                now = view.record(0)
                if now is not None and now.state is NodeState.RUNNING:
                    self._epoch = leader.epoch
                    return leader
                await self._wait()

    async def _present(self, epoch: int) -> None:
        if self._is_present:
            await self._presence.change(NodeState.JOINED, epoch)
            return
        holder = f"{self._service.id}-{secrets.token_hex(4)}"
        await self._presence.take(
            lambda: MemberRecord(holder=holder, epoch=epoch, state=NodeState.JOINED, host=self._host)
        )
        self._is_present = True
        self._service.spawn(self._presence.keep(), "group-record")

    async def _lend(self, leader: LeaderRecord) -> None:
        """Runs this node's ranks for one epoch; returns when the leader has ended it as it was told to."""
        settings = self._settings
        places = local_places(leader.common_place(self._host), settings.node_rank, settings.num_nodes, None)
        group = await RankGroup.start(
            settings.engine_module, places, settings.hang_timeout_s, interface_environ(self._host)
        )
        ranks = asyncio.create_task(self._until_lost(group, own_config(leader.config, settings.engine_config())))
        watch = asyncio.create_task(self._until_ended(leader))
        try:
            await asyncio.wait((ranks, watch), return_when=asyncio.FIRST_COMPLETED)
            if ranks.done() and not watch.done():
                # The ranks may have heard of the end before its reason is here.
                await asyncio.wait((watch,), timeout=LAST_WORD_S)
            if not watch.done():
                ranks.result()
            elif (problem := watch.result()) is not None:
                raise GroupLost(problem)
        finally:
            await end(ranks)
            await end(watch)
            await group.close()

    async def _until_lost(self, group: RankGroup, config: EngineConfig) -> None:
        group.send(Load(config=config))
        while True:
            frame = await group.read()
            if isinstance(frame, Refused):
                raise ConfigError(frame.key, frame.problem)

    async def _until_ended(self, leader: LeaderRecord) -> str | None:
        """Waits for the end of the leader's group. None if it was told to end, else why it is lost."""
        told = False
        while (problem := self._presence.view.lost_leader(leader, self._presence.now)) is None:
            if self._service.draining.is_set() and not told:
                told = True
                self._state = "draining"
                await self._presence.change(NodeState.DRAINING)
            await self._wait()
        record = self._presence.view.record(0)
        ended = record is not None and record.holder == leader.holder and record.state is NodeState.ENDED
        return None if ended and record is not None and not record.reason else problem

    async def _wait(self) -> None:
        await asyncio.sleep(CHECK_S)
        self._presence.tick()

    async def _unless_draining(self, work: Coroutine[Any, Any, LeaderRecord]) -> LeaderRecord | None:
        task = asyncio.create_task(work)
        return task.result() if await done_before(self._service.draining, task) else None


def own_config(leader: EngineConfig, own: EngineConfig) -> EngineConfig:
    """The leader's sizes, on this machine's device."""
    return replace(
        leader, model=own.model, device=own.device, num_threads=own.num_threads, gpu_memory_share=own.gpu_memory_share
    )
