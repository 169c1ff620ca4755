"""Two kinds of model for the decoding tests: tiny random ones, and ones that recite a script."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from wedlm_jax.decode.config import DecodeConfig
from wedlm_jax.decode.generation import SMALLEST_BUCKET
from wedlm_jax.hf.weight_map import rows
from wedlm_jax.model.config import ModelConfig
from wedlm_jax.model.handle import Model
from wedlm_jax.model.parameters import params_of, transformer_from
from wedlm_jax.model.patterns import of_read
from wedlm_jax.model.window_table import ON_CPU_FROM_CACHE

from ..reference.transformer import ReferenceTransformer

TINY = ModelConfig(
    vocab_size=11,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    rope_theta=100.0,
    max_position_embeddings=64,
    matmul_precision="highest",
)
MASK = TINY.vocab_size - 1

# The compiled loops that the tests share, with batches of ROWS rows, prompts and outputs of the smallest bucket:
# the settings that a loop is compiled for, and the window or block sizes of its bucket.
ROWS = 3
LOOPS: dict[str, tuple[dict, tuple[int, int]]] = {
    "streaming_eager": (dict(decoder="streaming", refill="eager"), (3, 4)),
    "streaming_paper": (dict(decoder="streaming", refill="paper"), (3, 4)),
    "streaming_fallback": (dict(decoder="streaming", verify="fallback"), (3, 4)),
    "verified": (dict(decoder="verified"), (3, 4)),
    "lookup": (dict(decoder="lookup"), (3, 4)),
    "blockwise": (dict(decoder="blockwise"), (3, 4)),
    "ar": (dict(decoder="ar"), (1, 1)),
}


def config_of(loop: str, **fields) -> DecodeConfig:
    """Settings that run in one of LOOPS, and that take decisions which depend on each of them."""
    fixed, (_, size) = LOOPS[loop]
    sizes = dict(window_size=size, block_size=size, max_new_tokens=14)
    thresholds = dict(entropy_threshold=1.0, confidence_threshold=0.5, stop_ids=())
    return DecodeConfig(**{**fixed, **sizes, **thresholds, **fields})


@functools.cache
def tiny_model(seed: int = 0, config: ModelConfig = TINY) -> Model:
    """Random weights with attention that is peaked and logits that spread: entropies from about 0 to 2 nats."""
    rng = np.random.default_rng(seed)
    params = {}
    for row in rows(config):
        shape = (config.num_layers, *row.our_shape(config)) if row.stacked else row.our_shape(config)
        noise = rng.normal(size=shape)
        if row.ours.endswith("scale"):
            gain = 2.0 if row.ours.endswith(("q_norm.scale", "k_norm.scale")) else 1.0
            value = gain + 0.2 * noise
        elif row.ours.endswith("bias") or row.ours == "embed.embedding":
            value = 0.5 * noise
        else:
            value = noise * config.hidden_size**-0.5 * (2.0 if row.ours == "lm_head.kernel" else 1.0)
        params[row.ours] = jnp.asarray(value, config.param_dtype)
    return Model(transformer_from(config, params), config, mask_token_id=config.vocab_size - 1)


def start_sizes(config: DecodeConfig) -> dict:
    """What `loop.start` is compiled for, beside the shapes of its arrays."""
    sizes = dict(slots=config.slots(ON_CPU_FROM_CACHE), output_slots=SMALLEST_BUCKET)
    return dict(**sizes, holds_back=config.holds_back, drafter=config.drafter)


def reference_of(model: Model) -> ReferenceTransformer:
    return ReferenceTransformer(model.config, {name: np.asarray(x) for name, x in params_of(model.transformer).items()})


class Reciter(nnx.Module):
    """Stands in for a transformer: a token at position p predicts chain[p + 1], a mask at position p predicts drafts[p]."""

    def __init__(self, chain: np.ndarray, drafts: np.ndarray, config: ModelConfig, mask_token_id: int):
        self.config, self.mask_token_id = config, mask_token_id
        self.chain = nnx.Variable(jnp.asarray(chain, jnp.int32))
        self.drafts = nnx.Variable(jnp.asarray(drafts, jnp.int32))
        self.layers = nnx.List()

    def empty_cache(self, batch, slots):
        return ()

    def hidden(self, tokens, *, positions, pattern, masked=None, cache=None):
        next_token = self.chain[...][jnp.minimum(positions + 1, self.chain.shape[0] - 1)]
        own_token = self.drafts[...][jnp.minimum(positions, self.drafts.shape[0] - 1)]
        predicted = of_read(pattern, jnp.where(tokens == self.mask_token_id, own_token, next_token))
        return 30 * jax.nn.one_hot(predicted, self.config.vocab_size), cache

    def logits(self, hidden):
        return hidden


def reciting_model(
    chain: list[int], *, vocab_size: int, mask_token_id: int, drafts: list[int] | None = None, tokenizer=None, eos=()
) -> Model:
    """Continues a one-token prompt with `chain`; its masks predict `drafts`, the same unless given."""
    sizes = dict(hidden_size=vocab_size, intermediate_size=2, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=2)
    config = ModelConfig(vocab_size=vocab_size, max_position_embeddings=256, **sizes)

    def padded(tokens: list[int]) -> np.ndarray:
        # Position 0 is the prompt token. One length for all scripts, so that one compiled loop serves them.
        return np.pad([0, *tokens], (0, 127 - len(tokens)))

    recited = Reciter(padded(chain), padded(chain if drafts is None else drafts), config, mask_token_id)
    return Model(recited, config, tokenizer, mask_token_id, tuple(eos))  # type: ignore[arg-type]
