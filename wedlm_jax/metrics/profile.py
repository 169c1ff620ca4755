"""A profiler trace of chosen steps, for TensorBoard's profile plugin or xprof."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

FOLDER = "profile"


@contextlib.contextmanager
def traced(
    step: int,
    chosen: tuple[int, ...],
    workdir: Path,
    paused: Callable[[], contextlib.AbstractContextManager[None]],
) -> Iterator[Callable[[Any], Any]]:
    """Traces what is run inside, in WORKDIR/profile/step_N, if `step` is chosen.

    Args:
      paused: inside it no time counts as training; to write a trace takes longer than a step.

    Yields:
      a function that its results go through: under a trace it waits for them, so that the step ends inside.
    """
    if step not in chosen:
        yield lambda results: results
        return
    with paused():
        jax.profiler.start_trace(str(workdir / FOLDER / f"step_{step}"))
    try:
        yield jax.block_until_ready
    finally:
        with paused():
            jax.profiler.stop_trace()
