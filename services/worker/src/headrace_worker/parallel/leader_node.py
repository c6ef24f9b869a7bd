"""Node 0 of a worker that is spread over machines: assembles the group, starts its ranks, watches the other nodes."""

import asyncio
import contextlib
import secrets
from collections.abc import Callable
from types import TracebackType

import structlog

from headrace_shared.bus import Bus
from headrace_shared.errors import HeadraceError
from headrace_shared.service import Service
from headrace_worker.parallel.address import address_toward, interface_environ
from headrace_worker.parallel.layout import check_nodes, local_places
from headrace_worker.parallel.leader_sockets import LeaderSockets, leader_sockets
from headrace_worker.parallel.presence import CHECK_S, Presence
from headrace_worker.parallel.rank_group import RankGroup
from headrace_worker.parallel.rendezvous import LeaderRecord, NodeState
from headrace_worker.settings import WorkerSettings

log = structlog.get_logger(__name__)


class NodesMissing(HeadraceError):
    def __init__(self, nodes: list[int], seconds: float) -> None:
        which = ", ".join(map(str, nodes))
        super().__init__(f"of the group's nodes {which} did not join within {seconds:.0f} s")


class LeaderNode:
    """Use as a context: at its end the other nodes are told that the group has ended, and why if it failed."""

    def __init__(self, service: Service, bus: Bus, settings: WorkerSettings, why: Callable[[], str]) -> None:
        """`why`: the reason of the worker's failure. Raises ConfigError."""
        num_ranks = settings.tensor_parallel * settings.pipeline_parallel
        check_nodes(num_ranks, settings.num_nodes, settings.node_rank, settings.group)
        self._service = service
        self._settings = settings
        self._presence = Presence(bus, settings.group, 0, settings.load_timeout_s)
        self._host = settings.group_host or address_toward(settings.nats_url)
        self._sockets: LeaderSockets | None = None
        self._record: LeaderRecord | None = None
        self._open = contextlib.ExitStack()
        self._problem = ""
        self._why = why

    async def __aenter__(self) -> "LeaderNode":
        await self._presence.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()
        if error is None:
            reason = ""
        elif isinstance(error, asyncio.CancelledError):
            reason = self._problem or self._why() or "it was stopped"
        else:
            reason = str(error) or type(error).__name__
        await self._presence.close(reason)

    async def assemble(self) -> None:
        """Returns when all nodes have joined. Raises ConfigError, or NodesMissing or GroupUnreachable after the
        time that loading may take."""
        settings = self._settings
        self._sockets = self._open.enter_context(leader_sockets(self._host, settings.group_port))
        await self._presence.take(self._make_record)
        self._service.spawn(self._presence.keep(), "group-record")
        record = self._taken()
        log.info("waiting for nodes", group=settings.group, epoch=record.epoch, num_nodes=record.num_nodes)
        deadline = self._presence.now + settings.load_timeout_s
        while missing := self._presence.view.missing(record, self._presence.now):
            if self._presence.now > deadline:
                raise NodesMissing(missing, settings.load_timeout_s)
            await asyncio.sleep(CHECK_S)
            self._presence.tick()
        await self._presence.change(NodeState.RUNNING)
        log.info("all nodes are there", group=settings.group, epoch=record.epoch)
        self._service.spawn(self._watch(record), "group-watch")

    async def start_ranks(self) -> RankGroup:
        """After `assemble`."""
        assert self._sockets is not None, "started before the group was assembled"
        record, settings = self._taken(), self._settings
        places = local_places(record.common_place(self._host), 0, record.num_nodes, self._sockets.fds)
        group = await RankGroup.start(
            settings.engine_module, places, settings.hang_timeout_s, interface_environ(self._host)
        )
        self._open.close()  # rank 0 has its own copies of the sockets
        return group

    def _make_record(self) -> LeaderRecord:
        assert self._sockets is not None
        store_port, command_port = self._sockets.ports
        self._record = LeaderRecord(
            holder=f"{self._service.id}-{secrets.token_hex(4)}",
            epoch=self._presence.view.next_epoch(),
            state=NodeState.ASSEMBLING,
            num_nodes=self._settings.num_nodes,
            tensor_parallel=self._settings.tensor_parallel,
            pipeline_parallel=self._settings.pipeline_parallel,
            host=self._host,
            store_port=store_port,
            command_port=command_port,
            token=secrets.token_hex(16),
            config=self._settings.engine_config(),
        )
        return self._record

    def _taken(self) -> LeaderRecord:
        assert self._record is not None, "the group was not taken yet"
        return self._record

    async def _watch(self, record: LeaderRecord) -> None:
        while True:
            await asyncio.sleep(CHECK_S)
            self._presence.tick()
            problem = self._presence.view.lost_member(record, self._presence.now)
            if problem is not None:
                self._problem = f"the group of {record.num_nodes} nodes is lost: {problem}"
                self._service.fail(self._problem)
                return
            if self._presence.view.drains(record) and not self._service.draining.is_set():
                log.info("a node is to stop: the whole worker drains")
                self._service.drain()
