"""The engine process: loads the model, then runs iterations for as long as its parent lives.

`python -m headrace_worker.engine_process FD`, where FD is a socket to the I/O process. One thread reads frames, the
main thread runs iterations, so that no broker ever sits between two kernel launches. It dies at once with its parent.

An engine of several ranks has such a process for each: the first does as said, the others do to their engines what the
first does to its own.
"""

import os
import queue
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import NoReturn

import msgspec

from headrace_shared import codec
from headrace_shared.errors import ConfigError
from headrace_shared.heap import keep_heap, kept_from_collector
from headrace_shared.messages import (
    Admission,
    BlockId,
    Request,
    RequestId,
    RouterId,
    SamplingParams,
    SequenceId,
    StopParams,
)
from headrace_shared.turns import keep_turn
from headrace_worker.adapters.loading import AdapterRead, put_in, start_reading
from headrace_worker.config import EngineConfig
from headrace_worker.engine_frames import (
    TOKENIZER_PART_BYTES,
    Load,
    LoadAdapter,
    Loaded,
    Loading,
    Refused,
    Rest,
    Rested,
    ToEngine,
    TokenizerPart,
    framed,
    read_frames,
)
from headrace_worker.iteration import Engine, EngineFacts, Report
from headrace_worker.loop import IterationLoop
from headrace_worker.loop_frames import apply_frame, iteration_frame
from headrace_worker.parallel.rank import Rank

Loader = Callable[[EngineConfig, Report], Engine]

MAX_QUEUED_FRAMES = 1024
"""Read ahead of the loop; beyond that the socket holds the I/O process back."""
EXIT_REFUSED = 2


def run(load: Loader, argv: list[str]) -> int:
    """Serves one parent over the socket in `argv`. Returns the exit code; an exception of the engine passes through."""
    # What a terminal sends to all, and others perhaps: the parent finishes what is running, and ends this one.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    keep_turn()
    with socket.socket(fileno=int(argv[0])) as connection:
        frames = read_frames(connection.makefile("rb"))
        config = codec.decode(next(frames), Load).config
        outlet = Outlet(connection)
        inbox: queue.Queue[ToEngine | AdapterRead] = queue.Queue(MAX_QUEUED_FRAMES)
        threading.Thread(target=_fill, args=(frames, inbox), name="frames", daemon=True).start()
        try:
            if config.place.world_size == 1:
                _serve(load(config, outlet.report), inbox, outlet, config.decode_slowdown)
            with Rank(config.place, outlet.send) as rank:
                rank.join()
                engine = load(config, outlet.report)
                if config.place.is_leader:
                    _serve(rank.lead(engine), inbox, outlet, config.decode_slowdown)
                keep_heap()
                rank.follow(engine)
        except ConfigError as error:
            outlet.send(Refused(key=error.key, problem=error.problem))
            return EXIT_REFUSED


class Outlet:
    """The way to the I/O process, open to several threads."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def send(self, frame: msgspec.Struct) -> None:
        data = framed(codec.encode(frame))
        with self._lock:
            self._connection.sendall(data)

    def report(self, stage: str, current: int, total: int) -> None:
        self.send(Loading(stage=stage, current=current, total=total))


def _serve(
    engine: Engine, inbox: "queue.Queue[ToEngine | AdapterRead]", outlet: Outlet, decode_slowdown: float
) -> NoReturn:
    loop = IterationLoop(engine, decode_slowdown=decode_slowdown)
    outlet.report("warming up", 0, 1)
    _warm_up(loop, engine.facts)
    keep_heap()
    announce(outlet, engine.facts)
    generation = 0
    while True:
        result = loop.step()
        if result is not None:
            outlet.send(iteration_frame(result, generation))
        generation = _take(inbox, loop, outlet, generation, wait=result is None)


def _take(
    inbox: "queue.Queue[ToEngine | AdapterRead]", loop: IterationLoop, outlet: Outlet, generation: int, wait: bool
) -> int:
    """Applies what has come; `wait`s for something if there is nothing to run. Returns the generation."""
    while True:
        try:
            frame = inbox.get(wait)
        except queue.Empty:
            return generation
        wait = False
        if isinstance(frame, LoadAdapter):
            start_reading(frame, loop.adapters, inbox)
            continue
        if isinstance(frame, AdapterRead):
            outlet.send(put_in(frame, loop.adapters))
            continue
        generation = apply_frame(frame, loop, generation)
        if isinstance(frame, Rest):
            outlet.send(Rested(generation=generation))


def _warm_up(loop: IterationLoop, facts: EngineFacts) -> None:
    """Generates tokens for real, from a full prompt chunk and from a single token: what is initialized lazily must not
    delay the first request, and a worker that cannot do this is never ready."""
    length = max(1, min(facts.tokens_per_iteration, facts.context - 2))
    blocks = tuple(BlockId(number) for number in range(-(-(length + 1) // facts.block_size)))
    request = Request(
        request_id=RequestId(""),
        router=RouterId(""),
        model="",
        prompt=codec.pack_ids([0] * length),
        sampling=SamplingParams(seed=0, temperature=0.0),
        stop=StopParams(max_tokens=2),
    )
    loop.admit(Admission(sequence_id=SequenceId(0), request=request, choice=0, attempt=0, block_ids=blocks))
    num_tokens = 0
    while (result := loop.step()) is not None:
        for row in result.sequences:
            if row.error is not None:
                raise RuntimeError(f"warm-up: {row.error}")
            num_tokens += row.token is not None
    if not num_tokens:
        raise RuntimeError("warm-up generated nothing")


def announce(outlet: Outlet, facts: EngineFacts) -> None:
    """Tells the tokenizer, in parts, and the rest of the facts."""
    tokenizer = facts.card.tokenizer
    for start in range(0, len(tokenizer), TOKENIZER_PART_BYTES):
        outlet.send(TokenizerPart(data=tokenizer[start : start + TOKENIZER_PART_BYTES]))
    card = msgspec.structs.replace(facts.card, tokenizer=b"")
    outlet.send(Loaded(**{**facts._asdict(), "card": card}))


def _fill(frames: Iterator[bytes], inbox: "queue.Queue[ToEngine | AdapterRead]") -> None:
    try:
        for data in frames:
            # Decoded here, while the main thread waits for the device.
            inbox.put(codec.decode(data, ToEngine))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    # The parent is gone: nobody hears of what the device still computes.
    os._exit(0)


def main() -> int:
    with kept_from_collector():
        from headrace_worker.parallel.loading import load  # torch: only this process pays for it

    return run(load, sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
