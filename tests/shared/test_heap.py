"""Which memory is put into huge pages."""

import subprocess
import sys
from pathlib import Path

from headrace_shared.heap import HUGE_PAGE, dense_regions, gather_heap

SMAPS = """\
{dense} rw-p 00000000 00:00 0                                    [heap]
Size:               6144 kB
Rss:                5000 kB
VmFlags: rd wr mr mw me ac sd
{sparse} rw-p 00000000 00:00 0
Size:               8192 kB
Rss:                  40 kB
VmFlags: rd wr mr mw me ac sd
{file} rw-p 00000000 fe:00 260386                                /usr/lib/libc.so
Size:               8192 kB
Rss:                8192 kB
{read_only} r--p 00000000 00:00 0
Size:               8192 kB
Rss:                8192 kB
{small} rw-p 00000000 00:00 0
Size:               1024 kB
Rss:                1024 kB
"""


def test_only_memory_in_use_that_is_nobody_elses() -> None:
    mib = 1 << 20

    def region(start_mib: int, size_mib: int) -> str:
        return f"{start_mib * mib:x}-{(start_mib + size_mib) * mib:x}"

    smaps = SMAPS.format(
        dense=region(1001, 6),
        sparse=region(2000, 8),
        file=region(3000, 8),
        read_only=region(4000, 8),
        small=region(5000, 1),
    )
    assert list(dense_regions(smaps)) == [(1002 * mib, 1006 * mib)]
    assert 1002 * mib % HUGE_PAGE == 0


def test_what_is_in_memory_stays_as_it_was() -> None:
    values = [bytes([number % 256]) * 1000 for number in range(20_000)]
    smaps = Path("/proc/self/smaps")
    assert not smaps.exists() or list(dense_regions(smaps.read_text()))
    gather_heap()
    assert all(value == bytes([number % 256]) * 1000 for number, value in enumerate(values))


def test_the_collector_works_again_when_imports_are_over() -> None:
    script = """
import gc
from headrace_shared.heap import kept_from_collector
with kept_from_collector():
    assert not gc.isenabled()
assert gc.isenabled() and gc.get_freeze_count() > 1000
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=100)
