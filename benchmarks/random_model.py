"""A model with random weights, as an HF directory of type qwen3 with the tokenizer of another model: for measuring time.

python -m benchmarks.random_model runs/34m --shape 34m --tokenizer runs/quickstart
"""

from __future__ import annotations

import dataclasses
from typing import Annotated

import jax
import tyro

from benchmarks import shapes
from wedlm_jax import Model, load, save
from wedlm_jax.errors import entry
from wedlm_jax.model.parameters import init_params, transformer_from


@dataclasses.dataclass(frozen=True)
class Flags:
    to: tyro.conf.Positional[str]
    tokenizer: Annotated[str, tyro.conf.arg(metavar="DIR")]
    """A model whose tokenizer and special ids it takes."""
    shape: shapes.Name = "34m"
    context: int = 2048
    seed: int = 0


def random_model(shape: shapes.Name, like: Model, *, context: int, seed: int = 0) -> Model:
    """Random float32 weights of a shape, with the tokenizer and the special ids of another model."""
    config = shapes.shape(shape, max_position_embeddings=context)
    params = jax.jit(lambda: init_params(config, seed))()
    return Model(transformer_from(config, params), config, like.tokenizer, like.mask_token_id, like.eos_token_ids)


@entry
def main() -> None:
    flags = tyro.cli(Flags, description=__doc__)
    save(
        random_model(flags.shape, load(flags.tokenizer), context=flags.context, seed=flags.seed), flags.to, arch="qwen3"
    )


if __name__ == "__main__":
    main()
