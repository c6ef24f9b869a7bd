"""nats-py's client without its queues: a message is handed over as it is read, and what is sent in one turn of the
event loop is written together at the next.

nats-py wakes a task to parse what was read, another for each subscription, and a third for what is to be written, at
each of the processes on a token's way. What its queues bound stays bounded: unread messages wait in the broker, which
drops a consumer that is too slow, and who sends looks at `unsent_bytes`. Connecting, all lines but messages, and the
end of the connection are left to nats-py. Two of its methods that are not public are replaced, and its streams are used
(its version is pinned).
"""

import asyncio
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import nats.aio.client
import nats.errors
import structlog

log = structlog.get_logger(__name__)


class Incoming(NamedTuple):
    """A message as it arrives. JetStream delivers under the message's own subject, `reply_to` is the ack subject."""

    subject: str
    reply_to: str
    data: bytes
    headers: Mapping[str, str]

    @property
    def status(self) -> str:
        """Of a message from the server itself, else empty."""
        return self.headers.get(_STATUS, "")


NO_HEADERS: Mapping[str, str] = {}
MAX_GATHERED_BYTES = 64 * 1024
"""More is written at once."""
MOST_BYTES = 1 << 26
"""Of what the broker sends in one piece; the longest are lists of 100,000 subjects. A greater size is damaged."""
MAX_DIGITS = 10
"""Of a size, or of a subscription's number."""
MAX_TOLD = 200
"""Bytes of a line that is not readable."""
_END = b"\r\n"
_STATUS = "Status"
_STATUS_LINE = re.compile(rb"NATS/1\.0 +(\d{3}) *(.*)", re.DOTALL)
_STORED = "Nats-Sequence"
"""A header of what is read out of a stream, which is never of the server itself."""


class DirectClient(nats.aio.client.Client):  # type: ignore[misc]  # nats-py has no types
    """For one connection; it does not reconnect."""

    def __init__(self) -> None:
        super().__init__()
        self._handlers: dict[int, Callable[[Incoming], None]] = {}
        """By the number of the subscription."""
        self._gathered: list[bytes] = []
        self._gathered_bytes = 0
        self._socket: asyncio.Transport | None = None

    async def connect(self, *arguments: Any, **options: Any) -> None:
        await super().connect(*arguments, **options)
        self._socket = socket = self._writer.transport
        socket.set_protocol(_Reader(socket.get_protocol(), self._handlers, socket.abort))

    @property
    def unsent_bytes(self) -> int:
        """What waits for this turn's end, or because the socket takes no more."""
        writer = self._writer
        return self._gathered_bytes + (0 if writer is None else int(writer.transport.get_write_buffer_size()))

    def send(self, subject: str, data: bytes, headers: Mapping[str, str] | None, reply_to: str) -> None:
        """Never waits. All arguments are valid. Raises ConnectionClosedError, MaxPayloadError."""
        if len(data) > self._max_payload:
            raise nats.errors.MaxPayloadError
        if headers:
            lines = "".join(f"{key}: {value}\r\n" for key, value in headers.items())
            head = f"NATS/1.0\r\n{lines}\r\n".encode()
            size = f"{len(head)} {len(head) + len(data)}"
            self._write(b"HPUB %b\r\n%b%b\r\n" % (f"{subject} {reply_to} {size}".encode(), head, data))
        else:
            self._write(b"PUB %b\r\n%b\r\n" % (f"{subject} {reply_to} {len(data)}".encode(), data))

    def listen(self, subject: str, handler: Callable[[Incoming], None]) -> int:
        """From now on `handler` gets the messages of this subject; it must not raise. Returns what `forget` takes.
        Raises ConnectionClosedError."""
        self._sid += 1
        self._write(f"SUB {subject} {self._sid}\r\n".encode())
        self._handlers[self._sid] = handler
        return int(self._sid)

    def forget(self, subscription: int) -> None:
        if self._handlers.pop(subscription, None) is not None and self._is_open:
            self._write(f"UNSUB {subscription}\r\n".encode())

    def abort(self) -> None:
        """Throws away what is unsent, and the socket."""
        self._take_gathered()
        if self._writer is not None:
            self._writer.transport.abort()

    @property
    def _writer(self) -> Any:
        return getattr(self._transport, "_io_writer", None)

    @property
    def _is_open(self) -> bool:
        """nats-py learns a moment later that its socket is closed, and uvloop lets nobody write to such a one."""
        return self.is_connected and self._socket is not None and not self._socket.is_closing()

    def _write(self, command: bytes) -> None:
        if not self._is_open:
            raise nats.errors.ConnectionClosedError
        if not self._gathered:
            asyncio.get_running_loop().call_soon(self._write_gathered)
        self._gathered.append(command)
        self._gathered_bytes += len(command)
        if self._gathered_bytes > MAX_GATHERED_BYTES:
            self._write_gathered()

    def _write_gathered(self) -> None:
        commands = self._take_gathered()
        if commands and self._is_open:
            self._transport.write(b"".join(commands))

    def _take_gathered(self) -> list[bytes]:
        commands, self._gathered, self._gathered_bytes = self._gathered, [], 0
        return commands

    # What nats-py calls.

    async def _send_command(self, cmd: bytes, priority: bool = False) -> None:
        if self._is_open:
            self._write(cmd)

    async def _flush_pending(self, force_flush: bool = False) -> None:
        self._write_gathered()
        # It counts its own ping, which it has written; at the end it would wait for it, on a socket that may be broken.
        self._pending_data_size = 0


class _Reader(asyncio.Protocol):
    """Takes the messages out of what is read. The rest is for the stream that nats-py reads."""

    def __init__(
        self,
        stream: Any,
        handlers: Mapping[int, Callable[[Incoming], None]],
        abort: Callable[[], None],
    ) -> None:
        """`stream`: the protocol of nats-py's stream. `abort` gives the connection up."""
        self._stream = stream
        self._abort = abort
        self._handlers = handlers
        self._rest = b""
        """Of a line or a message that is not complete."""

    def data_received(self, data: bytes) -> None:
        """Where a message is not what its line says, something on the way has lost or changed bytes, and what follows
        may be anything: the connection is given up, and what was asked on it has no answer."""
        try:
            self._read(self._rest + data if self._rest else data)
        except _Unreadable as error:
            log.warning("what comes from the broker is not readable", line=str(error))
            self._rest = b""
            self._abort()

    def _read(self, data: bytes) -> None:
        start = 0
        while (end := data.find(_END, start)) >= 0:
            begins = end + len(_END)
            if data.startswith((b"MSG ", b"HMSG "), start):
                line = data[start:end].split(b" ")
                num_sizes = 2 if line[0] == b"HMSG" else 1
                if not 3 <= len(line) - num_sizes <= 4 or (size := _number(line, -1)) > MOST_BYTES:
                    raise _unreadable(line)
                ends = begins + size
                if len(data) < ends + len(_END):
                    break
                if not data.startswith(_END, ends):
                    raise _unreadable(line)
                self._deliver(line, num_sizes, data[begins:ends])
                start = ends + len(_END)
            else:
                self._stream.data_received(data[start:begins])
                start = begins
        self._rest = data[start:]

    def _deliver(self, line: list[bytes], num_sizes: int, data: bytes) -> None:
        """`line`: MSG <subject> <number> [reply-to] <size>, or HMSG and the size of the headers before that of all.
        Subjects may hold any bytes but blanks and line ends: what others send must not cost us the connection."""
        handler = self._handlers.get(_number(line, 2))
        if handler is None:  # it was on its way when we unsubscribed
            return
        headers = NO_HEADERS
        if num_sizes == 2:
            size = _number(line, -2)
            if size > len(data):
                raise _unreadable(line)
            headers, data = _headers_of(data[:size]), data[size:]
        reply_to = line[3].decode(errors="replace") if len(line) > 3 + num_sizes else ""
        handler(Incoming(line[1].decode(errors="replace"), reply_to, data, headers))

    def eof_received(self) -> bool | None:
        kept_open: bool | None = self._stream.eof_received()
        return kept_open

    def connection_lost(self, exc: Exception | None) -> None:
        self._stream.connection_lost(exc)

    def pause_writing(self) -> None:
        self._stream.pause_writing()

    def resume_writing(self) -> None:
        self._stream.resume_writing()


class _Unreadable(Exception):
    """What is no line of the broker's."""


def _unreadable(line: list[bytes]) -> _Unreadable:
    return _Unreadable(repr(b" ".join(line)[:MAX_TOLD]))


def _number(line: list[bytes], place: int) -> int:
    word = line[place]
    if not word.isdigit() or len(word) > MAX_DIGITS:
        raise _unreadable(line)
    return int(word)


def _headers_of(block: bytes) -> dict[str, str]:
    """`NATS/1.0[ <status>[ <description>]]`, and below it a line for each header. Whoever stores a message may write
    there what he likes, but not a status."""
    first, *lines = block.split(_END)
    headers = {}
    for line in lines:
        name, colon, value = line.decode(errors="replace").partition(":")
        if colon:
            headers[name.strip()] = value.strip()
    headers.pop(_STATUS, None)
    told = _STATUS_LINE.match(first)
    if told is not None and _STORED not in headers:
        status, description = (part.decode(errors="replace") for part in told.groups())
        headers = {_STATUS: status, "Description": description, **headers}
    return headers
