"""glibc's allocator, made to give back what is large.

By itself it keeps what was freed: with each large block that is freed the size rises from which blocks are the system's
own (to 32 MiB), and every thread has a heap of its own. After thirteen large bodies a router held 4 GB.
"""

import ctypes
import os

MAX_HEAP_BLOCK_BYTES = 256 * 1024
MAX_FREE_TOP_BYTES = 1 << 20
MAX_HEAPS = 2

# From malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8


def bound_allocator() -> None:
    """For the start of a process, before its threads. Does nothing where there is another allocator."""
    try:
        set_option = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return
    for option, value in (
        (_M_MMAP_THRESHOLD, MAX_HEAP_BLOCK_BYTES),
        (_M_TRIM_THRESHOLD, MAX_FREE_TOP_BYTES),
        (_M_ARENA_MAX, MAX_HEAPS),
    ):
        set_option(option, value)


def bound_tokenizers() -> None:
    """The tokenizers' library has threads of its own, one for each processor, beside those that call it."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
