"""Compiles the kernels with the compiler that is at hand, once, into the user's cache.

The result depends on the sources, the compiler and the processor, so its name does too: whoever changes one of them
gets a new file, and nobody compiles twice. The file appears by a rename, so that two processes may compile at once. It
ends with a digest of all before it: a file that a crash or a full disk cut short is compiled again. To load it would
end the process, or fail at every start.
`python -m headrace_worker.native.build` does it ahead of the first start.
"""

import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from headrace_worker.native.errors import NativeUnavailable

SOURCES = Path(__file__).parent / "csrc"
COMPILERS = ("g++", "clang++", "c++")
COMPILE_TIMEOUT_S = 300.0
CACHE_VARIABLE = "HEADRACE_CACHE"

_log = logging.getLogger(__name__)


def built_library(defines: Sequence[str] = ()) -> Path:
    """The compiled kernels of this machine, compiled now if they never were. Raises NativeUnavailable.

    `defines`: HEADRACE_WITHOUT_AMX or HEADRACE_PORTABLE leave out the instructions that other machines lack."""
    compiler = find_compiler()
    flags = [*compile_flags(), *(f"-D{name}" for name in defines)]
    name = f"kernels-{_key(compiler, flags)}.so"
    folder = cache_folder()
    library = folder / name
    try:
        if _is_whole(library):
            return library
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix="build-") as scratch:
            fresh = Path(scratch) / name
            _compile(compiler, flags, fresh)
            with fresh.open("ab") as file:
                file.write(_digest(fresh.read_bytes()))
            os.replace(fresh, library)
    except OSError as error:
        raise NativeUnavailable(f"cannot use {folder}: {error}") from error
    return library


def find_compiler() -> str:
    """Path of a C++ compiler: $CXX, or the first known one on PATH. Raises NativeUnavailable."""
    for candidate in (os.environ.get("CXX", ""), *COMPILERS):
        if candidate and (path := shutil.which(candidate)):
            return path
    raise NativeUnavailable(f"no C++ compiler on PATH (looked for {', '.join(COMPILERS)})")


def compile_flags() -> list[str]:
    machine = platform.machine().lower()
    tuned = "-march=native" if machine in ("x86_64", "amd64", "i686") else "-mcpu=native"
    # Results are compared bit by bit between batches, so nothing here may let the compiler reorder sums.
    return ["-std=c++20", "-O3", tuned, "-fPIC", "-shared", "-fvisibility=hidden"]


def cache_folder() -> Path:
    if chosen := os.environ.get(CACHE_VARIABLE):
        return Path(chosen) / "kernels"
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path("~/.cache").expanduser()) / "headrace" / "kernels"
    except RuntimeError as error:
        raise NativeUnavailable("there is no home folder to keep them in; set XDG_CACHE_HOME") from error


def _is_whole(library: Path) -> bool:
    """Whether it is there, as it was written."""
    try:
        written = library.read_bytes()
    except FileNotFoundError:
        return False
    size = len(written) - hashlib.sha256().digest_size
    return size > 0 and _digest(written[:size]) == written[size:]


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()


def _compile(compiler: str, flags: list[str], target: Path) -> None:
    command = [compiler, *flags, *map(str, sorted(SOURCES.glob("*.cpp"))), "-o", str(target)]
    started = time.monotonic()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeUnavailable(f"{compiler} did not finish: {error}") from error
    if done.returncode != 0:
        raise NativeUnavailable(f"{compiler} failed: {done.stderr.strip()[-2000:]}")
    _log.info("compiled the CPU kernels in %.1f s", time.monotonic() - started)


def _key(compiler: str, flags: list[str]) -> str:
    digest = hashlib.sha256()
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    digest.update(repr((flags, _compiler_version(compiler), _processor())).encode())
    return digest.hexdigest()[:24]


def _compiler_version(compiler: str) -> str:
    try:
        done = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=10.0, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeUnavailable(f"{compiler} does not run: {error}") from error
    return done.stdout


def _processor() -> str:
    """What -march=native looks at."""
    kept = ("flags", "Features", "model name", "CPU implementer", "CPU part")
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    found = {line for line in lines if line.split(":")[0].strip() in kept}
    return "\n".join([platform.machine(), platform.processor(), *sorted(found)])


def main() -> int:
    try:
        sys.stdout.write(f"{built_library()}\n")
    except NativeUnavailable as error:
        sys.stdout.write(f"no compiled CPU kernels, torch's will be used: {error}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
