"""A server with OpenAI's interface whose answers, pauses and faults are written by the test."""

import asyncio
import json
from typing import Any


class FloodServer:
    """Answers each request with `num_tokens` chunks, `gap_s` apart."""

    def __init__(self) -> None:
        self.num_tokens = 3
        self.gap_s = 0.0
        self.first_s = 0.0
        self.status = 200
        self.breaks_after: int | None = None
        """Chunks before the connection is cut."""
        self.failure: dict[str, str] | None = None
        """An error event instead of the end."""
        self.tokens_per_chunk = 1
        self.freezes_for_s = 0.0
        """From the first request on, nothing is answered for so long."""
        self._frozen_until = 0.0
        self.asked: list[dict[str, Any]] = []
        self.authorization = ""
        self.num_connections = 0
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()

    async def start(self) -> str:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        for writer in self._open:
            writer.transport.abort()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        self._open.add(writer)
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                await self._answer(head.decode(), reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client has gone
        finally:
            self._open.discard(writer)
            writer.close()

    async def _answer(self, head: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        fields = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if ": " in line)
        body = await reader.readexactly(int(fields.get("content-length", "0")))
        self.authorization = fields.get("authorization", "")
        path = head.split(" ")[1]
        if path == "/v1/models":
            return self._whole(writer, 200, {"data": [{"id": "tiny"}]})
        if path == "/tokenize":
            return self._whole(writer, 200, {"count": 2 * len(json.loads(body)["prompt"].split())})
        request = json.loads(body)
        self.asked.append(request)
        if self.status != 200:
            return self._whole(writer, self.status, {"error": {"message": "No.", "code": "queue_full"}})
        now = asyncio.get_running_loop().time()
        if len(self.asked) == 1:
            self._frozen_until = now + self.freezes_for_s
        await asyncio.sleep(max(0.0, self._frozen_until - now))
        await self._stream(request, writer)

    async def _stream(self, request: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        self._event(writer, {"choices": [{"delta": {"role": "assistant", "content": ""}}], "usage": None})
        await asyncio.sleep(self.first_s)
        for number in range(self.num_tokens):
            if number == self.breaks_after:
                writer.transport.abort()
                return
            if number:
                await asyncio.sleep(self.gap_s)
            text = "word " * self.tokens_per_chunk
            piece = {"delta": {"content": text}} if "messages" in request else {"text": text}
            self._event(writer, {"choices": [piece]})
        if self.failure is not None:
            self._event(writer, {"error": self.failure})
        else:
            usage = {"prompt_tokens": 7, "completion_tokens": self.num_tokens * self.tokens_per_chunk}
            self._event(writer, {"choices": [], "usage": {**usage, "prompt_tokens_details": {"cached_tokens": 2}}})
        _chunk(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    def _event(self, writer: asyncio.StreamWriter, event: dict[str, Any]) -> None:
        _chunk(writer, b"data: " + json.dumps(event).encode() + b"\n\n")

    def _whole(self, writer: asyncio.StreamWriter, status: int, answer: dict[str, Any]) -> None:
        data = json.dumps(answer).encode()
        head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
        writer.write(head.encode() + data)


def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
