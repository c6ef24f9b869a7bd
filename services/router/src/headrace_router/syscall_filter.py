"""A filter of system calls (seccomp, Linux) for a process that computes and talks over pipes it already has.

What is not on the list fails with EPERM, and cannot be allowed again: files, connections, programs, processes. The list
is by number, so there is one for each architecture. Pure but for `install`.
"""

import ctypes
import errno
import os
import platform
import struct
import sys
from typing import NamedTuple


class Machine(NamedTuple):
    audit_arch: int
    """As the kernel names it to filters (linux/audit.h)."""
    calls: tuple[int, ...]
    """read, write, writev, close, lseek, fstat; mmap, mprotect, munmap, mremap, madvise, brk; rt_sigaction,
    rt_sigprocmask, rt_sigreturn, sigaltstack, restart_syscall; setitimer, getitimer, gettimeofday, clock_gettime,
    clock_getres, times, getrusage; futex, sched_yield, rseq, getpid, gettid, getrandom; exit, exit_group."""
    seccomp: int
    """Not allowed: with it the filter is installed."""


MACHINES = {
    "x86_64": Machine(
        0xC000003E,
        (
            *(0, 1, 20, 3, 8, 5),
            *(9, 10, 11, 25, 28, 12),
            *(13, 14, 15, 131, 219),
            *(38, 36, 96, 228, 229, 100, 98),
            *(202, 24, 334, 39, 186, 318),
            *(60, 231),
        ),
        317,
    ),
    "aarch64": Machine(
        0xC00000B7,
        (
            *(63, 64, 66, 57, 62, 80),
            *(222, 226, 215, 216, 233, 214),
            *(134, 135, 139, 132, 128),
            *(103, 102, 169, 113, 114, 153, 165),
            *(98, 124, 293, 172, 178, 278),
            *(93, 94),
        ),
        277,
    ),
}
_LOAD, _IF_EQUAL, _IF_NOT_LESS, _RETURN = 0x20, 0x15, 0x35, 0x06
_AT_NUMBER, _AT_ARCH = 0, 4
"""Offsets in what the kernel shows to a filter."""
_X32 = 0x4000_0000
"""x86's other set of calls begins here; ARM has no such numbers."""
_ALLOW, _EPERM, _KILL = 0x7FFF_0000, 0x0005_0001, 0x8000_0000
_STEP = "=HBBI"
_STEP_BYTES = struct.calcsize(_STEP)
_PR_SET_NO_NEW_PRIVS = 38
_SECCOMP_SET_MODE_FILTER, _ALL_THREADS = 1, 1


def program(machine: Machine) -> bytes:
    """The filter for the kernel's virtual machine (classic BPF)."""
    calls = sorted(machine.calls)
    steps = [
        (_LOAD, 0, 0, _AT_ARCH),
        (_IF_EQUAL, 1, 0, machine.audit_arch),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _AT_NUMBER),
        (_IF_NOT_LESS, len(calls), 0, _X32),
        *((_IF_EQUAL, len(calls) - index, 0, call) for index, call in enumerate(calls)),
        (_RETURN, 0, 0, _EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(struct.pack(_STEP, *step) for step in steps)


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("steps", ctypes.c_char_p))


def install() -> bool:
    """For this process with all its threads, for good, also for what it would start. False where there is none for this
    machine. Raises OSError where the kernel takes none."""
    machine = MACHINES.get(platform.machine()) if sys.platform == "linux" else None
    if machine is None:
        return False
    steps = program(machine)
    library = ctypes.CDLL(None, use_errno=True)
    zero = ctypes.c_ulong(0)
    # Without it only root may have a filter: what gains rights when it starts must not be filtered.
    _check(library.prctl(_PR_SET_NO_NEW_PRIVS, ctypes.c_ulong(1), zero, zero, zero))
    shown = ctypes.byref(_Program(len(steps) // _STEP_BYTES, steps))
    _check(library.syscall(ctypes.c_long(machine.seccomp), _SECCOMP_SET_MODE_FILTER, _ALL_THREADS, shown))
    return True


def _check(result: int) -> None:
    """0 is success; above it: the thread that could not have the filter."""
    if result:
        error = ctypes.get_errno() if result < 0 else errno.ESRCH
        raise OSError(error, os.strerror(error))
