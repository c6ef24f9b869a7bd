"""What it costs to read a log of tokens in envelopes, as routers do, and not directly, as schedulers do.

    python -m benchmarks.envelopes [--messages 1000] [--readers 20] [--rounds 5]

A broker of its own holds the logs of several requests, whose frames lie between each other. Each round reads one log
alone, and then all at once, in both ways in turn. Prints one JSON object: milliseconds, and the reader's own.
"""

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path
from statistics import median

from headrace_shared.broker import NatsServer
from headrace_shared.nats_api import JetStreamApi
from headrace_shared.nats_bus import NatsBus
from headrace_shared.nats_reading import StreamReader
from headrace_shared.subjects import TOKENS

FRAME_BYTES = 60
TIMEOUT_S = 60.0


async def read(reader: StreamReader, num_logs: int, num_messages: int) -> tuple[float, float]:
    """(milliseconds, of which the process computed)."""
    began, computed = time.monotonic(), time.process_time()
    logs = [reader.read(TOKENS.name, f"tokens.r.{number}", num_messages + 1) for number in range(num_logs)]
    for messages in await asyncio.gather(*logs):
        assert len(messages) == num_messages
    return (time.monotonic() - began) * 1e3, (time.process_time() - computed) * 1e3


async def measure(arguments: argparse.Namespace) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder:
        server = NatsServer(Path(folder), sync_interval="100ms")
        await server.start()
        bus = await NatsBus.connect(server.url, name="envelopes", on_closed=lambda: None)
        await bus.ensure_stream(TOKENS)
        num_messages, num_readers = arguments.messages, arguments.readers
        for count in range(num_messages):
            frames = (
                bus.enqueue(f"tokens.r.{number}", bytes(FRAME_BYTES), message_id=f"{number}-{count}")
                for number in range(num_readers)
            )
            await asyncio.gather(*frames)
        api = JetStreamApi(bus._store, TIMEOUT_S)
        ways = {"direct": StreamReader(api, is_direct=True), "envelopes": StreamReader(api, is_direct=False)}
        found: dict[str, list[tuple[float, float]]] = {}
        for _ in range(arguments.rounds):
            for name, reader in ways.items():
                for num_logs in (1, num_readers):
                    found.setdefault(f"{name}, {num_logs} at once", []).append(
                        await read(reader, num_logs, num_messages)
                    )
        await bus.close()
        await server.stop()
    return {
        name: {"ms": round(median(ms for ms, _ in rounds), 1), "own_ms": round(median(own for _, own in rounds), 1)}
        for name, rounds in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=1000)
    parser.add_argument("--readers", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    print(json.dumps(asyncio.run(measure(parser.parse_args())), indent=2))


if __name__ == "__main__":
    main()
