"""WeDLM in JAX: diffusion language models that decode in parallel under plain causal attention (arXiv 2512.22737)."""

from wedlm_jax.decode.config import DecodeConfig
from wedlm_jax.decode.stats import Completion, Stats
from wedlm_jax.generate import generate, stream
from wedlm_jax.model.config import ModelConfig
from wedlm_jax.model.handle import Model
from wedlm_jax.model.patterns import CachedWindow, Causal, DualStream

__all__ = [
    "CachedWindow",
    "Causal",
    "Completion",
    "DecodeConfig",
    "DualStream",
    "Model",
    "ModelConfig",
    "Stats",
    "generate",
    "stream",
]
