"""What LoRA adapters cost on the CPU: iterations of SmolLM2-135M in which none, some or all sequences have one.

    python -m benchmarks.adapters [--threads N] [--repetitions 15] [--rank 16]

Each line's variants run in turn; the median of the repetitions counts. With one thread the time is the thread's own
processor time, which other programs on the machine disturb least. Sequences decode one token each at a context of
256, or compute a prompt of 256 tokens.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec.structs import replace

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
from headrace_worker.config import EngineConfig
from headrace_worker.engine import load
from headrace_worker.iteration import SequenceSlice
from headrace_worker.torch_engine import TorchEngine
from tests.worker.adapters.peft_files import SMOLLM2_135M, write_adapter

CONTEXT = 256
BLOCKS = CONTEXT // 16
NUM_ADAPTERS = 4


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--native", default="auto")
    options = parser.parse_args()
    config = EngineConfig(
        device="cpu",
        dtype="bfloat16",
        native=options.native,
        num_threads=options.threads,
        num_blocks=40 * BLOCKS,
        max_loras=NUM_ADAPTERS,
    )
    engine = load(config, lambda what, done, total: None)
    assert isinstance(engine, TorchEngine)
    with tempfile.TemporaryDirectory() as folder:
        digests = [add_adapter(engine, Path(folder) / str(seed), seed, options.rank) for seed in range(NUM_ADAPTERS)]
    print("| sequences | none | all, one adapter | half, one adapter | all, four adapters |")
    print("|---|---|---|---|---|")
    for count, num_tokens in ((1, 1), (4, 1), (16, 1), (32, 1), (1, 256)):
        owners = [
            [""] * count,
            [digests[0]] * count,
            [digests[0] if number % 2 == 0 else "" for number in range(count)],
            [digests[number % NUM_ADAPTERS] for number in range(count)],
        ]
        runs = [prepared(engine, own, num_tokens, first_id=1 + 100 * place) for place, own in enumerate(owners)]
        clock = time.thread_time if options.threads == 1 else time.perf_counter
        times = [statistics.median(each) for each in in_turn(runs, options.repetitions, clock)]
        cells = [f"{1000 * times[0]:.2f} ms", *(f"{each / times[0]:.3f} x" for each in times[1:])]
        what = f"{count} decode" if num_tokens == 1 else f"{count} prompt of {num_tokens}"
        print(f"| {what} | {' | '.join(cells)} |", flush=True)


def add_adapter(engine: TorchEngine, folder: Path, seed: int, rank: int) -> str:
    write_adapter(folder, SMOLLM2_135M, rank=rank, alpha=rank, seed=seed, size=0.01)
    assert engine.adapters is not None
    read = engine.adapters.read(str(folder))
    engine.adapters.add(read)
    return read.digest


def prepared(engine: TorchEngine, owners: Sequence[str], num_tokens: int, first_id: int) -> Callable[[], None]:
    """One iteration, as often as it is called."""
    request = Request(
        request_id=RequestId(""),
        router=RouterId(""),
        model="",
        prompt=b"\0\0\0\0",
        sampling=SamplingParams(seed=0, temperature=0.0),
        stop=StopParams(max_tokens=1),
    )
    slices = []
    for number, digest in enumerate(owners):
        sequence_id = SequenceId(first_id + number)
        blocks = tuple(BlockId(number * BLOCKS + index) for index in range(BLOCKS))
        own = replace(request, adapter_digest=digest)
        engine.add(Admission(sequence_id=sequence_id, request=own, choice=0, attempt=0, block_ids=blocks))
        start = 0 if num_tokens > 1 else CONTEXT - 1
        slices.append(SequenceSlice(sequence_id, start, num_tokens, [7] * num_tokens, blocks, True))

    def run() -> None:
        engine.submit(slices)
        engine.collect()

    return run


def in_turn(runs: Sequence[Callable[[], None]], repetitions: int, clock: Callable[[], float]) -> list[list[float]]:
    times: list[list[float]] = [[] for _ in runs]
    for repetition in range(repetitions + 2):
        for run, own in zip(runs, times, strict=True):
            begun = clock()
            run()
            if repetition >= 2:
                own.append(clock() - begun)
    return times


if __name__ == "__main__":
    main()
