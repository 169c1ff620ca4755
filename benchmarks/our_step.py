"""The training step as `wedlm_jax.train` runs it, one at a time on demand: our side of `official.py`.

Reads JSON lines: the flags of `benchmarks.train_step`, then "start", "step" and "peak"; answers each with one.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from typing import Any

import jax

from benchmarks.side_by_side import machine
from benchmarks.train_step import Flags, random_batch, settings_of
from wedlm_jax.host_memory import use_huge_pages
from wedlm_jax.sharding import MeshConfig, make_mesh
from wedlm_jax.train_state import abstract_state, from_seed
from wedlm_jax.train_step import compile_step, place, wedlm_step


def main() -> None:
    use_huge_pages()
    flags = Flags(**json.loads(sys.stdin.readline()))
    settings = settings_of(flags)
    mesh = make_mesh(MeshConfig(data=1), jax.devices()[:1])
    batch = random_batch(flags, flags.lengths[0])
    state: Any = abstract_state(settings.model, settings.optimizer, mesh)
    compiled = compile_step(wedlm_step, settings, mesh).lower(state, place(batch, mesh)).compile()
    from_seed(settings.model, settings.optimizer, mesh, 0)  # compiled
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)  # gives back what the compiler has freed, so that it is not counted as there from the start
    sizes = compiled.memory_analysis()
    answer({
        "machine": machine(),
        "compiled": {"arguments": sizes.argument_size_in_bytes, "temporaries": sizes.temp_size_in_bytes},
    })  # fmt: skip
    for line in sys.stdin:
        match json.loads(line):
            case "start":
                state = from_seed(settings.model, settings.optimizer, mesh, 0)
                answer({"parameters": sum(x.size for x in state.params.values())})
            case "step":
                start, processor = time.perf_counter(), time.process_time()
                state, metrics = compiled(state, place(batch, mesh))
                loss = float(metrics["loss"])
                jax.block_until_ready(state)
                seconds = {"seconds": time.perf_counter() - start, "processor_seconds": time.process_time() - processor}
                answer(seconds | {"loss": loss})
            case "peak":
                answer({"bytes": (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")})


def answer(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    main()
