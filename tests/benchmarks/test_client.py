"""The client that measures servers, against one that does not keep connections."""

import asyncio

from benchmarks.client import run
from benchmarks.workload import Job

CHUNKS = b'data: {"choices": [{"text": "a"}]}\n\n' * 3 + b"data: [DONE]\n\n"
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"


async def test_a_connection_that_is_closed_behind_an_answer_costs_no_request() -> None:
    num_connections = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_connections
        num_connections += 1
        await reader.readuntil(b"\r\n\r\n")
        # As llama-server does: nothing says that the connection will not be kept, but the next request on it is lost.
        writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % len(CHUNKS) + CHUNKS)
        await reader.readuntil(b"}")
        await reader.read(1)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1")
    async with server:
        port = server.sockets[0].getsockname()[1]
        summary = await run("127.0.0.1", port, "m", [Job([1, 2, 3], 3)] * 6, 2)
    assert (summary.num_requests, summary.num_complete) == (6, 6)
    assert num_connections == 6
