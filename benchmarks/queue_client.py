"""A client that notes what it is told while it waits: refusals, places in the queue, expected waits."""

import asyncio
import json
import re
import time
from dataclasses import dataclass, field

_REPORT = re.compile(rb"position (\d+)(?:, eta ([0-9.]+) s)?")


@dataclass
class Told:
    """While waiting. Seconds after the request was sent."""

    at_s: float
    position: int
    eta_s: float | None


@dataclass
class Answer:
    status: int = 0
    refused_in_s: float = 0.0
    """Until the status line of a refusal."""
    retry_after_s: float = 0.0
    code: str = ""
    """Of a refusal, or of an error within a stream."""
    told: list[Told] = field(default_factory=list)
    first_token_s: float | None = None
    total_s: float = 0.0
    num_tokens: int = 0
    is_complete: bool = False


async def ask(
    host: str, port: int, body: dict[str, object], *, deadline_s: float = 0.0, patience_s: float = 600.0
) -> Answer:
    """One streamed completion. A connection that breaks is an answer that is not complete."""
    answer = Answer()
    data = json.dumps({"stream": True, "temperature": 0, "ignore_eos": True, **body}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nConnection: close\r\n"
    head += "User-Agent: curl/8\r\n"  # others are told nothing in comments
    if deadline_s:
        head += f"Headrace-Timeout: {deadline_s}\r\n"
    started = time.perf_counter()
    try:
        async with asyncio.timeout(patience_s):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
                await _read(reader, answer, started)
            finally:
                writer.close()
    except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
        answer.code = answer.code or type(error).__name__
    answer.total_s = time.perf_counter() - started
    return answer


async def _read(reader: asyncio.StreamReader, answer: Answer, started: float) -> None:
    status = await reader.readline()
    answer.status = int(status.split()[1]) if status.count(b" ") >= 1 else 0
    if answer.status != 200:
        answer.refused_in_s = time.perf_counter() - started
    while (line := await reader.readline()) not in (b"\r\n", b""):
        name, _, value = line.decode("latin-1").partition(":")
        if name.lower() == "retry-after":
            answer.retry_after_s = float(value)
    if answer.status != 200:
        rest = await reader.read()
        found = re.search(rb'"code":"([^"]*)"', rest)
        answer.code = found[1].decode() if found else ""
        return
    while line := await reader.readline():
        now_s = time.perf_counter() - started
        if line.startswith(b"data: [DONE]"):
            answer.is_complete = not answer.code
            return
        if line.startswith(b'data: {"error"'):
            found = re.search(rb'"code":"([^"]*)"', line)
            answer.code = found[1].decode() if found else "unknown"
        elif line.startswith(b"data: "):
            answer.num_tokens += 1
            if answer.first_token_s is None:
                answer.first_token_s = now_s
        elif line.startswith(b": ") and (found := _REPORT.search(line)):
            eta_s = float(found[2]) if found[2] else None
            answer.told.append(Told(now_s, int(found[1]), eta_s))
