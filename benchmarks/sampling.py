"""What it costs to draw the tokens of a forward, by what is set, beside one sort of the same logits.

    python -m benchmarks.sampling --vocab-size 151936 --slots 1 16

Logits are random; all ways take turns.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import tyro

from benchmarks.side_by_side import machine, print_table, side_by_side
from wedlm_jax import DecodeConfig
from wedlm_jax.decode.config import RowSettings
from wedlm_jax.decode.sampling import sample
from wedlm_jax.errors import entry
from wedlm_jax.model.window_table import ON_CPU

SETTINGS = (
    {},
    {"temperature": 0.8},
    {"temperature": 0.8, "top_k": 20},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.95},
)


@dataclasses.dataclass(frozen=True)
class Flags:
    vocab_size: int = 151_936
    """Of Qwen3."""
    slots: tuple[int, ...] = (1, 16)
    """Drawn at once, of one row."""
    rounds: int = 7


@entry
def main() -> None:
    flags = tyro.cli(Flags, description=__doc__)
    rows = []
    for slots in flags.slots:
        logits = 3 * jax.random.normal(jax.random.key(0), (1, slots, flags.vocab_size))
        programs = {"sort": (jnp.argsort, (logits,))}
        for given in SETTINGS:
            config = DecodeConfig(stop_ids=(), mask_token_id=0, **given)
            settings = RowSettings.from_configs([config], [0], window_table=ON_CPU)
            name = ", ".join(f"{key}={value}" for key, value in given.items()) or "greedy"
            programs[name] = sample, (logits, jnp.arange(slots)[None], settings)
        found = side_by_side(programs, flags.rounds)
        sort = found.pop("sort").seconds
        rows += [
            (str(slots), name, f"{1e3 * one.seconds:.1f}", f"{sort / one.seconds:.1f}") for name, one in found.items()
        ]
    print_table(
        f"{machine()}; vocabulary of {flags.vocab_size:,}, medians of {flags.rounds}",
        ("slots", "drawn by", "ms", "a sort takes so many times that"),
        rows,
    )


if __name__ == "__main__":
    main()
