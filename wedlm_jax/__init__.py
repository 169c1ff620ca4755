"""WeDLM in JAX: diffusion language models that decode in parallel under plain causal attention (arXiv 2512.22737)."""

import os
import sys

from wedlm_jax.errors import say_interrupted
from wedlm_jax.host_memory import use_huge_pages

# `python -m wedlm_jax.train` and the like, while Python looks for the module: nothing has happened yet.
if sys.argv[:1] == ["-m"]:
    use_huge_pages()
    say_interrupted()

# transformers serves tokenizers and chat templates here; that it finds no PyTorch is none of the user's concern.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

from wedlm_jax.decode.config import DecodeConfig
from wedlm_jax.decode.stats import Completion, Stats
from wedlm_jax.decode.text import Commit
from wedlm_jax.engine import Engine, Ticket
from wedlm_jax.generate import generate, stream
from wedlm_jax.model.adapter import AdapterConfig
from wedlm_jax.model.config import ModelConfig
from wedlm_jax.model.handle import Model
from wedlm_jax.model.patterns import CachedWindow, Causal, DualStream
from wedlm_jax.pretrained import load, save, save_adapter
from wedlm_jax.sharding import MeshConfig
from wedlm_jax.version import __version__

__all__ = [
    "AdapterConfig",
    "CachedWindow",
    "Causal",
    "Commit",
    "Completion",
    "DecodeConfig",
    "DualStream",
    "Engine",
    "MeshConfig",
    "Model",
    "ModelConfig",
    "Stats",
    "Ticket",
    "__version__",
    "generate",
    "load",
    "save",
    "save_adapter",
    "stream",
]
