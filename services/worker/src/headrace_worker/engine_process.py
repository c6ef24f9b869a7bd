"""The engine process: loads the model, then runs iterations for as long as its parent lives.

`python -m headrace_worker.engine_process FD`, where FD is a socket to the I/O process. One thread reads frames, the
main thread runs iterations, so that no broker ever sits between two kernel launches. It dies at once with its parent.
"""

import ctypes
import os
import queue
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from headrace_shared import codec
from headrace_shared.errors import ConfigError
from headrace_shared.messages import (
    Admission,
    BlockId,
    Grant,
    Request,
    RequestId,
    RouterId,
    SamplingParams,
    SequenceId,
    StopParams,
)
from headrace_worker.config import EngineConfig
from headrace_worker.engine_frames import (
    HEADER,
    MAX_FRAME_BYTES,
    TOKENIZER_PART_BYTES,
    Iteration,
    Load,
    Loaded,
    Loading,
    Refused,
    Reset,
    Row,
    ToEngine,
    TokenizerPart,
)
from headrace_worker.iteration import Engine, EngineFacts
from headrace_worker.loop import IterationLoop, StepResult

Report = Callable[[str, int, int], None]
"""Stage, current, total."""
Loader = Callable[[EngineConfig, Report], Engine]

MAX_QUEUED_FRAMES = 1024
"""Read ahead of the loop; beyond that the socket holds the I/O process back."""
EXIT_REFUSED = 2
_PR_SET_PDEATHSIG = 1


def run(load: Loader, argv: list[str]) -> int:
    """Serves one parent over the socket in `argv`. Returns the exit code; an exception of the engine passes through."""
    _die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with socket.socket(fileno=int(argv[0])) as connection:
        frames = _read_frames(connection)
        first = codec.decode(next(frames), Load)
        inbox: queue.Queue[ToEngine] = queue.Queue(MAX_QUEUED_FRAMES)
        threading.Thread(target=_fill, args=(frames, inbox), name="frames", daemon=True).start()
        try:
            engine = load(first.config, lambda *stage: _send(connection, _loading(*stage)))
        except ConfigError as error:
            _send(connection, Refused(key=error.key, problem=error.problem))
            return EXIT_REFUSED
        loop = IterationLoop(engine)
        _send(connection, Loading(stage="warm-up", current=0, total=1))
        _warm_up(loop)
        _announce(connection, engine.facts)
        generation = 0
        while True:
            result = loop.step()
            if result is not None:
                _send(connection, _iteration(result, generation))
            generation = _take(inbox, loop, generation, wait=result is None)


def _take(inbox: "queue.Queue[ToEngine]", loop: IterationLoop, generation: int, wait: bool) -> int:
    """Applies what has come; `wait`s for something if there is nothing to run. Returns the generation."""
    while True:
        try:
            frame = inbox.get(wait)
        except queue.Empty:
            return generation
        wait = False
        if isinstance(frame, Grant):
            for admission in frame.admissions:
                loop.admit(admission)
            for extension in frame.extensions:
                loop.extend(extension)
            for sequence_id in frame.releases:
                loop.release(sequence_id)
        elif isinstance(frame, Reset):
            loop.reset()
            generation = frame.generation


def _warm_up(loop: IterationLoop) -> None:
    """Generates tokens for real: compiles kernels, and a worker that cannot do this is never ready."""
    request = Request(
        request_id=RequestId(""),
        router=RouterId(""),
        model="",
        prompt=codec.pack_ids([0]),
        sampling=SamplingParams(seed=0, temperature=0.0),
        stop=StopParams(max_tokens=2),
    )
    admission = Admission(sequence_id=SequenceId(0), request=request, choice=0, attempt=0, block_ids=(BlockId(0),))
    loop.admit(admission)
    num_tokens = 0
    while (result := loop.step()) is not None:
        for row in result.sequences:
            if row.error is not None:
                raise RuntimeError(f"warm-up: {row.error}")
            num_tokens += row.token is not None
    if not num_tokens:
        raise RuntimeError("warm-up generated nothing")


def _announce(connection: socket.socket, facts: EngineFacts) -> None:
    tokenizer = facts.card.tokenizer
    for start in range(0, len(tokenizer), TOKENIZER_PART_BYTES):
        _send(connection, TokenizerPart(data=tokenizer[start : start + TOKENIZER_PART_BYTES]))
    card = msgspec.structs.replace(facts.card, tokenizer=b"")
    _send(connection, Loaded(**{**facts._asdict(), "card": card}))


def _iteration(result: StepResult, generation: int) -> Iteration:
    return Iteration(
        generation=generation,
        num_iterations=result.num_iterations,
        rows=tuple([Row(*row) for row in result.sequences]),
        released=tuple(result.released),
        num_prefill_tokens=result.num_prefill_tokens,
        elapsed_s=result.elapsed_s,
    )


def _loading(stage: str, current: int, total: int) -> Loading:
    return Loading(stage=stage, current=current, total=total)


def _send(connection: socket.socket, frame: msgspec.Struct) -> None:
    data = codec.encode(frame)
    connection.sendall(HEADER.pack(len(data)) + data)


def _read_frames(connection: socket.socket) -> Iterator[bytes]:
    """Ends when the parent closes its end."""
    with connection.makefile("rb") as stream:
        while True:
            header = stream.read(HEADER.size)
            if len(header) < HEADER.size:
                return
            (size,) = HEADER.unpack(header)
            if size > MAX_FRAME_BYTES:
                raise ValueError(f"frame of {size} bytes")
            data = stream.read(size)
            if len(data) < size:
                return
            yield data


def _fill(frames: Iterator[bytes], inbox: "queue.Queue[ToEngine]") -> None:
    try:
        for data in frames:
            # Decoded here, while the main thread waits for the device.
            inbox.put(codec.decode(data, ToEngine))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    # The parent is gone: nobody hears of what the device still computes.
    os._exit(0)


def _die_with_parent() -> None:
    """The kernel kills this process when its parent dies (Linux); elsewhere the closed socket does."""
    if sys.platform == "linux":
        libc: Any = ctypes.CDLL(None, use_errno=True)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> int:
    from headrace_worker.engine import load  # torch: only this process pays for it

    return run(load, sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
