"""Everything that reads what others wrote, with nearly valid input, for as long as wanted.

    python -m benchmarks.fuzz --minutes 60 [--seed N] [--only wire] [--keep FOLDER]

Any error that is not the one meant for it is a failure, and so is a run of more than two seconds; a panic or a crash
of native code leaves its input in the file `last` of the folder. Prints a table, and ends with exit code 1 after
failures.
"""

import argparse
import asyncio
import resource
import sys
import tempfile
import time
import warnings
from pathlib import Path
from random import Random

from tests.fuzz.all_targets import all_targets
from tests.fuzz.fuzzing import MAX_FAILURES, Findings, Target, fuzz, peak_memory_mib
from tests.fuzz.http import fuzz_http

ROUND = 100
"""Runs of a target before the next one's turn."""
MAX_MEMORY_BYTES = 8 << 30
"""Of address space: an allocation by what a file only claims fails."""


def main() -> int:
    options = _options()
    warnings.simplefilter("ignore")
    folder = Path(options.keep or tempfile.mkdtemp(prefix="headrace-fuzz-"))
    files = folder / "files"
    files.mkdir(parents=True)
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    targets = [_noted(each, folder / "last") for each in all_targets(files) if options.only in each.name]
    if not targets and options.only not in "http":
        print(f"no target has {options.only!r} in its name")
        return 2
    findings, random = Findings(), Random(options.seed)
    print(
        f"seed {options.seed}, {len(targets)} targets and the router's routes, inputs that fail in {folder}", flush=True
    )
    ends_at = time.monotonic() + 60.0 * options.minutes
    memory_at_first = 0
    while time.monotonic() < ends_at and len(findings.failures) < MAX_FAILURES:
        for target in targets:
            if time.monotonic() < ends_at or not findings.num_runs[target.name]:
                fuzz(target, random, ROUND, findings)
        if options.only in "http":
            asyncio.run(fuzz_http(random, ROUND, findings))
        memory_at_first = memory_at_first or peak_memory_mib()
    for name in findings.num_runs:
        runs, accepted = findings.num_runs[name], findings.num_accepted[name]
        share = accepted / max(1, runs)
        most = f"{findings.slowest_s[name]:6.3f} s and {findings.growth_mib.get(name, 0):4} MiB at most"
        print(f"{name:45} {runs:10,} runs  {share:5.1%} valid  {most}")
    print(
        f"{findings.num_runs.total():,} runs, {memory_at_first} MiB after one round, {peak_memory_mib()} MiB in the end"
    )
    for number, failure in enumerate(findings.failures):
        (folder / f"failure-{number}").write_bytes(failure.data)
        print(f"FAILED {failure.target}: {failure.what} (failure-{number})")
    print(f"{len(findings.failures)} failures")
    return 1 if findings.failures else 0


def _noted(target: Target, last: Path) -> Target:
    """One that leaves its input behind if it takes the process with it."""
    file = last.open("wb", buffering=0)

    def run(data: bytes) -> None:
        file.seek(0)
        file.write(f"{target.name} {len(data)}\n".encode() + data)
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
