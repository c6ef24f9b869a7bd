"""What the processes have in common that the router starts to do what may run away (`helper.py` is the router's side).

Each reads messages from standard input and writes replies to standard output, in turn, each behind its length.
"""

import contextlib
import resource
import signal
import struct
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from headrace_router import syscall_filter
from headrace_shared.tether import end_with_parent

LENGTH = struct.Struct("<I")
NUM_FILES = 8
"""Descriptors: standard ones and a few of Python's own."""


def confine(max_memory_bytes: int) -> None:
    """For the start of `main`. `max_memory_bytes`: of address space."""
    end_with_parent(signal.SIGKILL)
    for number in (signal.SIGINT, signal.SIGHUP):  # from a terminal: for the router, which ends this one
        signal.signal(number, signal.SIG_IGN)
    # Where memory gets short, this process goes first, and not the router.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    limit(resource.RLIMIT_AS, max_memory_bytes)
    limit(resource.RLIMIT_CORE, 0)


def shut_in() -> None:
    """What the process works at may get out of hand: nothing that it could reach then is left open. What it needs is
    imported before, and its threads are started."""
    limit(resource.RLIMIT_FSIZE, 0)
    limit(resource.RLIMIT_NOFILE, NUM_FILES)
    limit(resource.RLIMIT_NPROC, 0)
    # Some kernels and containers have none; then the limits are all there is.
    with contextlib.suppress(OSError):
        syscall_filter.install()


def limit(kind: int, most: int) -> None:
    """For ever; what is limited more strictly already stays so."""
    _, hard = resource.getrlimit(kind)
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(kind, (most, most))


def serve(answer: Callable[[bytes], bytes], requests: BinaryIO, replies: BinaryIO) -> None:
    """Until the requests end."""
    while len(head := requests.read(LENGTH.size)) == LENGTH.size:
        num_bytes = LENGTH.unpack(head)[0]
        message = requests.read(num_bytes)
        if len(message) < num_bytes:
            return  # cut off in the middle
        reply = answer(message)
        replies.write(LENGTH.pack(len(reply)) + reply)
        replies.flush()
