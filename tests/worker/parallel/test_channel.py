"""Who is let into a group, and what is noticed of those who leave it."""

import queue
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from msgspec.structs import replace

from headrace_shared.errors import ProtocolError
from headrace_shared.messages import SequenceId
from headrace_worker.iteration import SampledToken
from headrace_worker.parallel.channel import FollowerChannel, LeaderChannel, PeerLost
from headrace_worker.parallel.frames import Add, Iterate, Join, ToFollower, pack
from headrace_worker.parallel.leader_sockets import LeaderSockets, leader_sockets
from headrace_worker.parallel.place import RankPlace
from tests.worker.loop_builders import admission

COMMAND = Iterate(1, [SequenceId(3)], [], b"\1\0\0\0")


@contextmanager
def places(num_ranks: int) -> Iterator[tuple[list[RankPlace], LeaderSockets]]:
    with leader_sockets("127.0.0.1", 0) as sockets:
        common = RankPlace(tensor_parallel=num_ranks, command_port=sockets.ports[1], token="secret")
        yield (
            [
                replace(common, rank=rank, command_fd=socket.dup(sockets.command.fileno()) if rank == 0 else None)
                for rank in range(num_ranks)
            ],
            sockets,
        )


def start_follower(place: RankPlace, lost: "queue.Queue[str]") -> "queue.Queue[FollowerChannel]":
    opened: queue.Queue[FollowerChannel] = queue.Queue()
    threading.Thread(target=lambda: opened.put(FollowerChannel.open(place, 5.0, lost.put)), daemon=True).start()
    return opened


def test_every_follower_gets_every_command_and_the_leader_its_answers() -> None:
    lost: queue.Queue[str] = queue.Queue()
    with places(3) as ((leader_place, *others), _):
        opened = [start_follower(place, lost) for place in others]
        leader = LeaderChannel.open(leader_place, 5.0, lost.put)
        followers = [each.get(timeout=5.0) for each in opened]
        assert followers[0].receive(wait=False) is None
        commands: list[ToFollower] = [COMMAND, Add(0, [], admission(5, [1, 2], [0]))]
        for command in commands:
            leader.send(command)
        for follower in followers:
            assert [follower.receive(wait=True) for _ in commands] == commands
        answer = [SampledToken(SequenceId(3), 42), SampledToken(SequenceId(4), 0, None, "broken")]
        followers[1].answer(answer)
        assert leader.receive() == answer
        assert lost.empty()
        followers[0].close()
        noticed = {lost.get(timeout=5.0) for _ in range(2)}
        assert noticed == {"rank 0 closed its connection", "rank 1 closed its connection"}
        leader.close()
        lost.get(timeout=5.0)


def test_a_stranger_is_turned_away_and_a_late_rank_let_in() -> None:
    lost: queue.Queue[str] = queue.Queue()
    with places(2) as ((leader_place, place), sockets):
        address = ("127.0.0.1", sockets.ports[1])
        strangers = [socket.create_connection(address) for _ in range(4)]
        strangers[0].sendall(b"GET / HTTP/1.1\r\n\r\n")
        strangers[1].sendall(pack(Join(1, "guessed")))
        strangers[2].sendall(pack(Join(7, "secret")))
        strangers[3].close()
        opened = start_follower(place, lost)
        leader = LeaderChannel.open(leader_place, 20.0, lost.put)
        follower = opened.get(timeout=5.0)
        leader.send(COMMAND)
        assert follower.receive(wait=True) == COMMAND
        assert lost.empty()
        leader.close()
        for stranger in strangers:
            stranger.close()


def test_a_rank_that_does_not_come_is_named() -> None:
    with places(2) as ((leader_place, _), _), pytest.raises(PeerLost, match="rank 1 has not joined"):
        LeaderChannel.open(leader_place, 0.2, lambda problem: None)


def test_a_leader_that_is_not_there_is_told_with_its_address() -> None:
    with leader_sockets("127.0.0.1", 0) as sockets:
        port = sockets.ports[1]
    start = time.monotonic()
    with pytest.raises(PeerLost, match=f"127.0.0.1:{port}"):
        FollowerChannel.open(RankPlace(rank=1, tensor_parallel=2, command_port=port), 0.3, lambda problem: None)
    assert time.monotonic() - start < 30.0


def test_a_connection_that_breaks_at_once_is_a_lost_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(socket.socket):
        def sendall(self, *arguments: Any) -> None:
            raise ConnectionResetError("reset")

    monkeypatch.setattr(socket, "create_connection", lambda address, timeout: Broken())
    with pytest.raises(PeerLost, match="reset"):
        FollowerChannel.open(RankPlace(rank=1, tensor_parallel=2, command_port=1), 1.0, lambda problem: None)


def test_a_command_above_the_limit_is_refused_before_it_is_sent() -> None:
    with pytest.raises(ProtocolError, match="exceeds"):
        pack(Iterate(0, [], [], bytes(9 << 20)))
