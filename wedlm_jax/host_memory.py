"""Host memory in pages of 2 MiB.

XLA on CPU allocates a step's buffers anew each time. glibc takes large blocks from the kernel and hands them back when they are
freed, so that every step finds its memory again page by page: 58,500 faults in a step of the quickstart with pages of 4 KiB,
500 with pages of 2 MiB (benchmarks/RESULTS.md). Blocks kept in the process instead (mallopt) cost no fault, but leave holes of a
whole step's size.
"""

from __future__ import annotations

import os
import sys

TUNABLE = "glibc.malloc.hugetlb"


def use_huge_pages() -> None:
    """Starts the process anew, with glibc (2.35 or later) told to ask for huge pages: it reads its settings as a process starts.

    Call it before anything that must not happen twice. It does nothing where the environment has a word on it already, such as
    `GLIBC_TUNABLES=glibc.malloc.hugetlb=0`; C libraries and kernels that cannot do it ignore it.
    """
    settings = os.environ.get("GLIBC_TUNABLES", "")
    if sys.platform != "linux" or not sys.executable or TUNABLE in settings:
        return
    os.environ["GLIBC_TUNABLES"] = ":".join(filter(None, (settings, f"{TUNABLE}=1")))  # 1: by madvise
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
