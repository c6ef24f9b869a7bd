"""The sockets between the leader of a group and its followers: one TCP connection each, on one machine as between many.

The leader writes a command to every follower; a follower blocks in `recv` until there is one, so nobody spins and none
of them needs the leader's Python. What a follower does not read waits in the sockets' buffers, then holds the leader
up: the group then makes no progress, which its supervisor notices. Of a broken connection `on_lost` is told at once, in
a thread of its own, since the main thread may be waiting for the device.
"""

import contextlib
import hmac
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from headrace_shared.errors import HeadraceError, ProtocolError
from headrace_worker.engine_frames import read_frames
from headrace_worker.iteration import SampledToken
from headrace_worker.parallel.frames import Join, Sampled, ToFollower, pack, unpack_answer, unpack_command
from headrace_worker.parallel.place import RankPlace

MAX_QUEUED_FRAMES = 256
"""Read ahead; beyond that the sockets hold the other end back."""
JOIN_TIMEOUT_S = 5.0
"""For a connected rank to say who it is."""
RETRY_S = 0.1
SILENCE_S = 8
"""After which the kernel gives up a machine that does not answer any more."""

OnLost = Callable[[str], None]


class PeerLost(HeadraceError):
    """Another rank of the group is gone, or never came."""


class _Peer(NamedTuple):
    socket: socket.socket
    frames: Iterator[bytes]


class LeaderChannel:
    """Rank 0's end: a connection to every other rank."""

    def __init__(self, peers: dict[int, _Peer], on_lost: OnLost) -> None:
        self._peers = peers
        self._answers: queue.Queue[list[SampledToken] | None] = queue.Queue(MAX_QUEUED_FRAMES)
        """None after the last one."""
        for rank in peers:
            # Blocked in recv all the time, except for the sampler of a pipeline.
            threading.Thread(target=self._listen, args=(rank, on_lost), name=f"rank-{rank}", daemon=True).start()

    @classmethod
    def open(cls, place: RankPlace, timeout_s: float, on_lost: OnLost) -> "LeaderChannel":
        """Waits for all followers. Raises PeerLost if one has not come in time."""
        assert place.command_fd is not None, "rank 0 was given no listening socket"
        deadline = time.monotonic() + timeout_s
        peers: dict[int, _Peer] = {}
        with socket.socket(fileno=place.command_fd) as listener:
            while missing := sorted(set(range(1, place.world_size)) - peers.keys()):
                listener.settimeout(max(0.01, deadline - time.monotonic()))
                try:
                    connection, _ = listener.accept()
                except TimeoutError as error:
                    raise PeerLost(f"rank {missing[0]} has not joined within {timeout_s:.0f} s") from error
                if (joined := _welcome(connection, place.token, missing)) is not None:
                    peers[joined[0]] = joined[1]
        return cls(peers, on_lost)

    def send(self, command: ToFollower) -> None:
        """To every follower. Raises PeerLost if one is gone, ProtocolError if the command is too large."""
        data = pack(command)
        try:
            for peer in self._peers.values():
                peer.socket.sendall(data)
        except OSError as error:
            raise PeerLost(f"a rank takes no commands any more: {error}") from error

    def receive(self) -> list[SampledToken]:
        """The sampler's next answer; waits for it. Raises PeerLost when a rank is gone."""
        answer = self._answers.get()
        if answer is None:
            raise PeerLost("a rank is gone")
        return answer

    def close(self) -> None:
        """Ends the connections; `on_lost` is called, as if they had broken."""
        for peer in self._peers.values():
            _end(peer.socket)

    def _listen(self, rank: int, on_lost: OnLost) -> None:
        problem = f"rank {rank} closed its connection"
        try:
            with self._peers[rank].socket:
                for data in self._peers[rank].frames:
                    answer = unpack_answer(data)
                    if not isinstance(answer, Sampled):
                        raise ProtocolError(f"rank {rank} sent {type(answer).__name__}")
                    self._answers.put(answer.tokens)
        except (OSError, ProtocolError) as error:
            problem = f"the connection to rank {rank} is broken: {error}"
        on_lost(problem)
        self._answers.put(None)


class FollowerChannel:
    """The end of any other rank: a connection to rank 0."""

    def __init__(self, connection: socket.socket, on_lost: OnLost) -> None:
        self._connection = connection
        self._commands: queue.Queue[ToFollower | None] = queue.Queue(MAX_QUEUED_FRAMES)
        """None after the last one."""
        threading.Thread(target=self._listen, args=(on_lost,), name="leader", daemon=True).start()

    @classmethod
    def open(cls, place: RankPlace, timeout_s: float, on_lost: OnLost) -> "FollowerChannel":
        """Connects to rank 0. Raises PeerLost if that is not possible in time."""
        deadline = time.monotonic() + timeout_s
        address = (place.leader_host, place.command_port)
        while True:
            left_s = deadline - time.monotonic()
            try:
                connection = socket.create_connection(address, timeout=max(left_s, RETRY_S))
                break
            except OSError as error:
                if left_s <= 0:
                    raise PeerLost(f"rank 0 is not to be reached at {address[0]}:{address[1]}: {error}") from error
                time.sleep(RETRY_S)
        try:
            _prepare(connection)
            connection.sendall(pack(Join(place.rank, place.token)))
        except OSError as error:
            connection.close()
            raise PeerLost(f"rank 0 ended the connection at once: {error}") from error
        return cls(connection, on_lost)

    def receive(self, wait: bool) -> ToFollower | None:
        """The next command; None if there is none and it is not to `wait`. Raises PeerLost when rank 0 is gone."""
        try:
            command = self._commands.get(wait)
        except queue.Empty:
            return None
        if command is None:
            raise PeerLost("rank 0 is gone")
        return command

    def answer(self, tokens: list[SampledToken]) -> None:
        """Raises PeerLost."""
        try:
            self._connection.sendall(pack(Sampled(tokens)))
        except OSError as error:
            raise PeerLost(f"rank 0 takes no tokens any more: {error}") from error

    def close(self) -> None:
        """Ends the connection; `on_lost` is called, as if it had broken."""
        _end(self._connection)

    def _listen(self, on_lost: OnLost) -> None:
        problem = "rank 0 closed its connection"
        try:
            with self._connection, self._connection.makefile("rb") as stream:
                for data in read_frames(stream):
                    self._commands.put(unpack_command(data))
        except (OSError, ProtocolError) as error:
            problem = f"the connection to rank 0 is broken: {error}"
        on_lost(problem)
        self._commands.put(None)


def _welcome(connection: socket.socket, token: str, missing: list[int]) -> tuple[int, _Peer] | None:
    """Whoever has connected, if it is a rank that is still missing."""
    peer = _Peer(connection, read_frames(connection.makefile("rb")))
    try:
        connection.settimeout(JOIN_TIMEOUT_S)
        join = unpack_answer(next(peer.frames, b""))
        if isinstance(join, Join) and join.rank in missing and hmac.compare_digest(join.token, token):
            _prepare(connection)
            return join.rank, peer
    except (OSError, ProtocolError):
        pass  # no rank of ours: ours try again, and one that does not come is missed
    connection.close()
    return None


def _prepare(connection: socket.socket) -> None:
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        for option, value in (
            (socket.TCP_KEEPIDLE, 2),
            (socket.TCP_KEEPINTVL, 2),
            (socket.TCP_KEEPCNT, SILENCE_S // 2 - 1),
            (socket.TCP_USER_TIMEOUT, SILENCE_S * 1000),
        ):
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _end(connection: socket.socket) -> None:
    """Whoever reads from it closes it."""
    with contextlib.suppress(OSError):  # it has ended already
        connection.shutdown(socket.SHUT_RDWR)
