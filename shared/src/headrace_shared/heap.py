"""What a process has loaded when it is ready stays until its end: Python's garbage collector and the system's page
tables are told so."""

import contextlib
import ctypes
import gc
import re
from collections.abc import Iterator
from pathlib import Path

MADV_COLLAPSE = 25
"""Of Linux since 6.1; others refuse it. `mmap` has no name for it."""
HUGE_PAGE = 2 << 20
_REGION = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) rw-p 0+ 00:00 0\b.*\n(?:(?!Rss:).*\n)*Rss: +(\d+) kB$", re.MULTILINE)
"""Private and anonymous memory in /proc/self/smaps."""


@contextlib.contextmanager
def kept_from_collector() -> Iterator[None]:
    """For the import of large libraries: what they make is kept until the end, and to look at it again and again while
    it grows takes a third of the time."""
    gc.disable()
    try:
        yield
    finally:
        keep_imports()


def keep_imports() -> None:
    """What has been imported is kept until the end, without a look at it. The collector works from here on."""
    gc.freeze()
    gc.enable()


def keep_heap() -> None:
    """To be called once, when a process has loaded what it keeps until its end. From time to time Python looks at every
    object for cycles that are garbage; modules and models are a hundred thousand, and looking at them stops everything
    for 10 ms in a scheduler, 20 ms in a router and 100 ms in an engine with torch."""
    gc.collect()
    gc.freeze()


def gather_heap() -> None:
    """Puts what is in memory now into huge pages. A process that shares its core with others finds nothing in the
    processor's caches when its turn comes; with pages of 4 KiB the addresses of all that it touches are looked up
    again, too. That was a fifth of a service's time."""
    try:
        smaps = Path("/proc/self/smaps").read_text()
    except OSError:
        return
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for start, end in dense_regions(smaps):
        madvise(start, end - start, MADV_COLLAPSE)  # where the system cannot, everything stays as it is


def dense_regions(smaps: str) -> Iterator[tuple[int, int]]:
    """Where memory is in use. A stack, say, has megabytes of addresses and uses kilobytes: those would become real."""
    for start, end, resident_kib in _REGION.findall(smaps):
        first = -(-int(start, 16) // HUGE_PAGE) * HUGE_PAGE
        last = int(end, 16) // HUGE_PAGE * HUGE_PAGE
        if first < last and int(resident_kib) * 1024 >= 0.75 * (int(end, 16) - int(start, 16)):
            yield first, last
