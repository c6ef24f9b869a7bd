"""Everything that reads what others wrote, with nearly valid input, for as long as wanted.

    python -m benchmarks.fuzz --minutes 60 [--seed N] [--only wire] [--keep FOLDER]

Any error that is not the one meant for it is a failure, and so is a run of more than two seconds of processor time (of
its own: what seems to take longer is measured twice more, with nothing else going on); a panic or a crash of native
code leaves its input in the file `last` of the folder. Prints a table, and ends with exit code 1 after failures.
"""

import argparse
import asyncio
import gc
import logging
import resource
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from random import Random

import structlog

from tests.fuzz.all_targets import all_targets
from tests.fuzz.cost import peak_memory_mib
from tests.fuzz.fuzzing import MAX_FAILURES, Findings, Target, fuzz
from tests.fuzz.http import fuzz_http

ROUND = 100
"""Runs of a target before the next one's turn."""
HTTP_ROUND = 500
REPORT_S = 300.0
MAX_MEMORY_BYTES = 8 << 30
"""Of address space: an allocation by what a file only claims fails."""


def main() -> int:
    options = _options()
    warnings.simplefilter("ignore")
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    folder = Path(options.keep or tempfile.mkdtemp(prefix="headrace-fuzz-"))
    files = folder / "files"
    files.mkdir(parents=True)
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    note = _noting(folder / "last")
    targets = [_noted(each, note) for each in all_targets(files) if options.only in each.name]
    has_http = options.only in "http"
    if not targets and not has_http:
        print(f"no target has {options.only!r} in its name")
        return 2
    findings, random = Findings(), Random(options.seed)
    print(f"seed {options.seed}, {len(targets)} targets and the router, inputs that fail in {folder}", flush=True)
    started_at = time.monotonic()
    ends_at, reports_at = started_at + 60.0 * options.minutes, started_at
    memory_at_first = 0
    while time.monotonic() < ends_at and len(findings.failures) < MAX_FAILURES:
        for target in targets:
            if time.monotonic() < ends_at or not findings.num_runs[target.name]:
                fuzz(target, random, ROUND, findings)
        if has_http:
            asyncio.run(fuzz_http(random, HTTP_ROUND, findings, note))
        gc.collect()
        if not memory_at_first:
            gc.freeze()  # no call pays for a search through all that is loaded
            memory_at_first = peak_memory_mib()
        if time.monotonic() >= reports_at:
            reports_at += REPORT_S
            minutes = (time.monotonic() - started_at) / 60.0
            print(
                f"{minutes:5.1f} min {findings.num_runs.total():,} runs {len(findings.failures)} failures", flush=True
            )
    _report(findings, folder)
    print(f"{memory_at_first} MiB after one round, {peak_memory_mib()} MiB in the end")
    print(f"{len(findings.failures)} failures in {(time.monotonic() - started_at) / 60.0:.1f} min")
    return 1 if findings.failures else 0


def _report(findings: Findings, folder: Path) -> None:
    for name in findings.num_runs:
        runs, accepted = findings.num_runs[name], findings.num_accepted[name]
        share = accepted / max(1, runs)
        most = f"{findings.slowest_s[name]:6.3f} s and {findings.growth_mib.get(name, 0):4} MiB at most"
        doubted = findings.num_doubted[name]
        print(f"{name:45} {runs:10,} runs  {share:5.1%} valid  {most}" + (f", {doubted} again" if doubted else ""))
    print(f"{findings.num_runs.total():,} runs, {findings.num_doubted.total()} measured again")
    for number, failure in enumerate(findings.failures):
        (folder / f"failure-{number}").write_bytes(failure.data)
        print(f"FAILED {failure.target}: {failure.what} (failure-{number})")


def _noting(last: Path) -> Callable[[bytes], None]:
    """Leaves an input behind if it takes the process with it."""
    file = last.open("wb", buffering=0)

    def note(data: bytes) -> None:
        file.seek(0)
        file.write(data)

    return note


def _noted(target: Target, note: Callable[[bytes], None]) -> Target:
    def run(data: bytes) -> None:
        note(f"{target.name} {len(data)}\n".encode() + data)
        target.run(data)

    return target._replace(run=run)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 1_000_000)
    parser.add_argument("--only", default="", help="only targets with this in their name")
    parser.add_argument("--keep", default="", help="a new folder for what fails")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
