"""A small step of a large experiment, compiled for chips that need not be there, and what must not be in its text."""

from __future__ import annotations

import math
import re

from tests.conftest import FULL
from wedlm_jax.absent_devices import devices
from wedlm_jax.ahead_of_time import trace_step
from wedlm_jax.experiment import load_experiment
from wedlm_jax.sharding import make_mesh

# A length, of which a quarter fills tiles where programs for quarters are compiled, widths and a vocabulary that no other
# dimension has; the vocabulary is the largest. Half the length compiles in half the time.
L, V, D, F, N, K, H, RESTS_ON = 2560 if FULL else 1280, 50_176, 384, 896, 4, 2, 128, {"data": 1, "fsdp": 4, "tensor": 2}
TOKENS, COLUMNS = {L, 2 * L}, {V, V // 2}


def compiled_text(name, topology):
    sizes = dict(
        vocab_size=V, hidden_size=D, intermediate_size=F, num_heads=N, num_kv_heads=K, head_dim=H, num_layers=2
    )
    model = [f"model.{field}={size}" for field, size in sizes.items()]
    mesh = [f"mesh.{axis}={size}" for axis, size in RESTS_ON.items()]
    experiment = load_experiment(
        name, [*model, *mesh, f"data.row_length={L}", "train.batch_size=4", "train.micro_batches=1"]
    )
    mesh = make_mesh(experiment.mesh, devices(topology))
    return trace_step(experiment, mesh).lower().compile().as_text()


def shapes_in(text: str) -> set[tuple[int, ...]]:
    return {tuple(map(int, dims.split(","))) for dims in re.findall(r"\b[a-z]+\d*\[([\d,]+)\]", text)}


def masks_and_logits(shapes: set[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Those with two axes of tokens, with one of tokens and one of the vocabulary, or with as many elements as all logits of a
    stream have on one device, whatever their axes are called."""
    return [
        shape
        for shape in shapes
        if sum(size in TOKENS for size in shape) > 1
        or (TOKENS.intersection(shape) and COLUMNS.intersection(shape))
        or math.prod(shape) >= L * min(COLUMNS)
    ]
