"""A tiny random model that speaks bytes, and the sizes that the tests of the engine share, so that few loops compile."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from wedlm_jax import Completion, DecodeConfig, Engine, Model

from ..decode.models import TINY, config_of, tiny_model
from ..decode.test_stream import tokenizer

SIZES = dict(rows=3, context=64, steps=2)


@functools.cache
def talker() -> Model:
    """Most of its characters take several tokens."""
    config = dataclasses.replace(TINY, vocab_size=len(tokenizer()), max_position_embeddings=128)
    special = dict(tokenizer=tokenizer(), mask_token_id=tokenizer().mask_token_id)
    return dataclasses.replace(tiny_model(0, config), **special, eos_token_ids=(tokenizer().eos_token_id,))


def talk(loop: str, **fields) -> DecodeConfig:
    """Settings under which the talker fills one to several masks a forward."""
    return config_of(loop, **{"entropy_threshold": 4.2, "confidence_threshold": 0.1, **fields})


def engine(model: Model | None = None, **sizes) -> Engine:
    return Engine(model or talker(), **{**SIZES, **sizes})


def same(ours: Completion, alone: Completion) -> bool:
    """Equal but for the last bits of the log-probabilities."""
    if ours.log_probs is not None and alone.log_probs is not None:
        floats = (np.array(c.log_probs, float) for c in (ours, alone))  # None is NaN
        np.testing.assert_allclose(*floats, atol=1e-4)
        ours, alone = (dataclasses.replace(c, log_probs=None) for c in (ours, alone))
    return ours == alone
