"""A tiny random model with the quickstart's tokenizer, for tests that need a whole handle."""

import functools

from flax import nnx

from wedlm_jax.data.config import DataConfig
from wedlm_jax.data.tokenizer import TokenizerConfig
from wedlm_jax.data.tokenizer_training import make_tokenizer
from wedlm_jax.model.config import ModelConfig
from wedlm_jax.model.handle import Model
from wedlm_jax.model.transformer import Transformer


@functools.cache
def tiny_model(seed: int = 0) -> Model:
    tokenizer = make_tokenizer(TokenizerConfig(), DataConfig())
    config = ModelConfig(
        vocab_size=512, hidden_size=16, intermediate_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8,
        max_position_embeddings=512, tie_word_embeddings=True,
    )  # fmt: skip
    transformer = Transformer(config, rngs=nnx.Rngs(seed))
    return Model(transformer, config, tokenizer, tokenizer.mask_token_id, (tokenizer.eos_token_id,))
