"""What the load generator itself costs: how many streams a core can hold.

    python -m benchmarks.flood [--streams 2000] [--tokens-per-s 50] [--seconds 15]

A server that does next to nothing streams to `headrace flood`; the generator's processor time is read when it ends, so
other load on the machine matters little.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import cast

from headrace_cli.flood.report import Report, read_report

PIECE = b'data: {"choices":[{"index":0,"delta":{"content":" word"},"finish_reason":null}]}\n\n'
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"data: [DONE]\n\n"


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


class Server(asyncio.Protocol):
    """Answers whatever is asked with a stream of the wanted length."""

    gap_s = 0.02

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one, but does not inherit from it
        self._received = b""

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, separator, body = self._received.partition(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0] or b"0")
        if separator and len(body) >= length:
            self._received = b""
            if b"/chat/completions" in head:
                self._transport.write(HEAD)
                self._stream(json.loads(body)["max_tokens"])
            else:
                answer = b'{"data":[{"id":"tiny"}]}'
                reply = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(answer)
                self._transport.write(reply + answer)

    def _stream(self, left: int) -> None:
        if self._transport.is_closing():
            return
        data = chunk(PIECE) if left else chunk(END) + b"0\r\n\r\n"
        self._transport.write(data)
        if left:
            asyncio.get_running_loop().call_later(self.gap_s, self._stream, left - 1)


async def serve(tokens_per_s: float) -> None:
    Server.gap_s = 1.0 / tokens_per_s
    server = await asyncio.get_running_loop().create_server(Server, "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def flood(port: int, streams: int, seconds: float, tokens: int) -> tuple[float, int, Report]:
    """(processor seconds, peak memory in KiB, report)."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.json"
        command = [sys.executable, "-m", "headrace_cli", "flood", "--url", f"http://127.0.0.1:{port}"]
        command += ["--concurrency", str(streams), "--duration", str(seconds), "--drain", "0", "--json", str(path)]
        process = subprocess.Popen([*command, "--output-tokens", str(tokens)], stdout=subprocess.DEVNULL)
        _, _, usage = os.wait4(process.pid, 0)
        return usage.ru_utime + usage.ru_stime, usage.ru_maxrss, read_report(str(path))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=2000)
    parser.add_argument("--tokens-per-s", type=float, default=50.0)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--serve", action="store_true")
    given = parser.parse_args()
    if given.serve:
        import uvloop

        uvloop.run(serve(given.tokens_per_s))
        return
    command = [sys.executable, "-m", "benchmarks.flood", "--serve", "--tokens-per-s", str(given.tokens_per_s)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        port = int(server.stdout.readline())
        rest_s, rest_kib, _ = flood(port, 1, 2.0, 10)
        busy_s, busy_kib, report = flood(port, given.streams, given.seconds, 200)
    finally:
        server.kill()
        server.wait()
    num_pieces = max(1, report.itl.count)
    cost_s = (busy_s - rest_s) / num_pieces
    print(f"{given.streams} streams, {num_pieces} pieces, {report.num_requests} requests")
    late_ms = report.send_lag.p99 or 0.0
    print(
        f"{1e6 * cost_s:.1f} µs of a core a piece; {busy_s / given.seconds:.0%} of a core; late by p99 {late_ms:.1f} ms"
    )
    print(f"{(busy_kib - rest_kib) / given.streams:.1f} KiB a stream")
    print(f"a core holds about {1 / cost_s / given.tokens_per_s:.0f} streams of {given.tokens_per_s:.0f} tokens/s")


if __name__ == "__main__":
    main()
