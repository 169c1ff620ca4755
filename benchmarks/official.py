"""Our training step beside that of the official trainer: two processes that take turns in one run.

Theirs is `official_step.py`, run by an interpreter with torch; ours is `our_step.py`. They are fed the same tokens, two
steps each at a time, of which the second counts, and answer on a pipe in lines of JSON. On a CPU their memory is read from
outside, the same way for both: the greatest resident size from before there are parameters to after the last step, less what
was resident at the start (with all imported and, for ours, the step compiled), for ours at least what the compiled step needs.
On a GPU each one's allocator tells its peak.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.side_by_side import print_table
from wedlm_jax.baselines.process import PAUSE

if TYPE_CHECKING:
    import numpy as np

    from benchmarks.train_step import Flags
    from wedlm_jax.model.config import ModelConfig

HERE = Path(__file__).parent
MASK_TOKEN_ID = 1
OF_OUR_STEP = (
    "shape",
    "rows",
    "documents",
    "block_size",
    "layers",
    "dtype",
    "remat",
    "mlp_tile",
    "scan_layers",
    "attention",
)
# Of their config class, and of ours.
FIELDS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "attention_bias": "qkv_bias",
    "qk_norm": "qk_norm",
    "rope_theta": "rope_theta",
    "rms_norm_eps": "rms_norm_eps",
    "tie_word_embeddings": "tie_word_embeddings",
}


class Side:
    """A process that takes a job and then makes one step at a time."""

    def __init__(self, name: str, command: list[str], job: dict[str, Any]) -> None:
        self.name = name
        pipe = subprocess.PIPE
        environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # both live on one GPU
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=HERE.parent, env=environment)
        self.about = self.ask(job)
        self._start = self._resident("VmRSS")
        Path(f"/proc/{self._process.pid}/clear_refs").write_text("5")  # VmHWM counts from here
        self.parameters = self.ask("start")["parameters"]
        self.steps: list[dict[str, float]] = []

    def ask(self, message: Any) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            print(json.dumps(message), file=self._process.stdin, flush=True)
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            sys.exit(f"error: {self.name} ended without an answer; what it said is above")
        return json.loads(answer)

    def peak(self) -> int:
        """Bytes."""
        on_device = self.ask("peak")["bytes"]
        return self._resident("VmHWM") - self._start if on_device is None else on_device

    def median(self, field: str) -> float:
        return statistics.median(step[field] for step in self.steps)

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _resident(self, field: str) -> int:
        for line in Path(f"/proc/{self._process.pid}/status").read_text().splitlines():
            if line.startswith(field):
                return 1024 * int(line.split()[1])
        raise AssertionError(field)


def compare(flags: Flags, length: int, model: ModelConfig, tokens: np.ndarray) -> None:
    """Prints a table of both for rows of this length."""
    ours = Side(
        "our step",
        [sys.executable, "-m", "benchmarks.our_step"],
        {name: getattr(flags, name) for name in OF_OUR_STEP} | {"lengths": [length]},
    )
    job = {
        "tokens": tokens.ravel().tolist(),
        "document_length": length // flags.documents,
        "block_size": flags.block_size,
        "mask_token_id": MASK_TOKEN_ID,
        "dtype": model.dtype,
        "model": {theirs: getattr(model, name) for theirs, name in FIELDS.items()},
    }
    theirs = Side(
        "the official step", [flags.official_python, str(HERE / "official_step.py"), str(flags.official)], job
    )
    sides = (theirs, ours)
    for side in sides:
        side.ask("step")  # for warming up
    for _ in range(flags.rounds):
        for side in sides:
            time.sleep(PAUSE)
            side.ask("step")  # not counted: a virtual machine may have handed to its host what the last one freed
            side.steps.append(side.ask("step"))
    needed = sum(ours.about["compiled"].values())
    # Freed memory that was resident at the start is used again, and then looks like none.
    peaks = [theirs.peak(), max(ours.peak(), needed)]
    for side in sides:
        side.end()

    rows = [
        (
            side.name,
            f"{side.parameters / 1e6:.2f}M",
            f"{side.median('seconds'):.3f}",
            f"{side.median('processor_seconds'):.2f}",
            f"{tokens.size / side.median('seconds'):,.0f}",
            f"{peak / 2**20:,.0f}",
            f"{side.steps[-1]['loss']:.3f}",
        )
        for side, peak in zip(sides, peaks, strict=True)
    ]
    print_table(
        f"{ours.about['machine']}, torch {theirs.about['torch']} on {theirs.about['threads']} threads; {flags.shape}, "
        f"{model.dtype}, {flags.rows} x {length} tokens, medians of {flags.rounds}",
        ("", "parameters", "s", "processor s", "tokens/s", "peak memory, MiB", "last loss"),
        rows,
    )
    turns = [a["seconds"] / b["seconds"] for a, b in zip(theirs.steps, ours.steps, strict=True)]
    processor = theirs.median("processor_seconds") / ours.median("processor_seconds")
    arguments, temporaries = (ours.about["compiled"][name] / 2**20 for name in ("arguments", "temporaries"))
    print(
        f"\nOfficial / ours: time {statistics.median(turns):.2f} (median of the turns), processor time {processor:.2f}, "
        f"peak memory {peaks[0] / peaks[1]:.2f}.\n"
        f"Our compiled step: {arguments:,.0f} MiB of arguments, {temporaries:,.0f} MiB of temporaries."
    )
    for side in sides:
        print(f"Seconds of {side.name}: {', '.join(format(step['seconds'], '.2f') for step in side.steps)}.")
    print()
