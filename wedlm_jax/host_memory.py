"""Keep freed host memory in the process.

XLA on CPU allocates a step's buffers anew each time. glibc hands large blocks back to the kernel when they are freed and
takes them again page by page: 87,000 page faults in one step of the quickstart, against 9,000 (benchmarks/RESULTS.md).
"""

from __future__ import annotations

import ctypes
import sys

# mallopt(3), from malloc.h
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX, M_ARENA_MAX = -1, -2, -4, -8


def keep_freed_memory() -> None:
    """Tells glibc to keep what is freed. Call it before JAX starts its threads.

    Does nothing where the C library is another one.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    mallopt(M_ARENA_MAX, 1)  # the arenas of other threads are too small for these blocks
    mallopt(M_MMAP_MAX, 0)
    mallopt(M_TRIM_THRESHOLD, -1)  # never
    mallopt(M_TOP_PAD, 2**26)
