"""The models that are measured, by name."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from wedlm_jax.experiment import load_experiment
from wedlm_jax.model.config import ModelConfig

Name = Literal["tiny", "quickstart", "34m", "110m", "qwen3_0p6b", "qwen3_1p7b", "qwen3_8b"]

_SMALL = {
    "tiny": ModelConfig(
        vocab_size=512, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16
    ),
    # 33.6M parameters: the shape that the official trainer was measured at on a CPU.
    "34m": ModelConfig(
        vocab_size=8192, hidden_size=512, intermediate_size=1536, num_layers=8, num_heads=8, num_kv_heads=4, head_dim=64
    ),
    # 110.1M parameters, as many as the smallest GPT-2 of 12 layers, with gated MLPs.
    "110m": ModelConfig(
        vocab_size=32768,
        hidden_size=768,
        intermediate_size=2048,
        num_layers=12,
        num_heads=12,
        num_kv_heads=12,
        head_dim=64,
        tie_word_embeddings=True,
    ),
}
_OF_EXPERIMENTS = {
    "quickstart": ("quickstart_base", ()),
    "qwen3_0p6b": ("qwen3_0p6b_sft", ()),
    "qwen3_1p7b": ("qwen3_0p6b_sft", ("model.hidden_size=2048", "model.intermediate_size=6144")),
    "qwen3_8b": ("qwen3_8b_cpt", ()),
}


def shape(name: Name, **changes: Any) -> ModelConfig:
    """The model of this name, nothing of it recomputed; a change to None is none."""
    if name in _SMALL:
        model = _SMALL[name]
    else:
        experiment, overrides = _OF_EXPERIMENTS[name]
        model = load_experiment(experiment, [*overrides, "model.remat=none"]).model
    return dataclasses.replace(model, **{field: value for field, value in changes.items() if value is not None})
