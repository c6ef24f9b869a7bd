"""A system whose workers take a GPU's time and compute nothing, slowed down so that small loads queue."""

import argparse
import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.e2e.launcher import Launched, launched

MODEL = "smollm2-135m"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--places", type=int, default=8, help="sequences that one worker runs at a time")
    parser.add_argument("--slowdown", type=float, default=5.0, help="iterations take so many times an H100's")
    parser.add_argument("--routers", type=int, default=1)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument(
        "--output-tokens", type=int, default=48, help="mean; lengths are drawn from half to one and a half"
    )
    parser.add_argument("--seed", type=int, default=1)


@contextlib.contextmanager
def simulated(options: argparse.Namespace, **variables: str) -> Iterator[Launched]:
    environment = {
        "HEADRACE_ENGINE": "timing",
        "HEADRACE_TIMING_SLOWDOWN": str(options.slowdown),
        "HEADRACE_MAX_SEQUENCES": str(options.places),
        "HEADRACE_LOG_LEVEL": "warning",
        **{f"HEADRACE_{name.upper()}": value for name, value in variables.items()},
    }
    arguments = ["--sim", "--workers", str(options.workers), "--routers", str(options.routers), "--no-autoscaler"]
    with (
        tempfile.TemporaryDirectory() as directory,
        launched(
            Path(directory), *arguments, "--max-sequences", str(options.places), environment=environment
        ) as system,
    ):
        yield system
