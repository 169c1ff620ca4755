"""`wedlm_jax.generate` is a function; `python -m wedlm_jax.generate` is the command in `__main__.py`."""

from wedlm_jax.decode.generation import generate, stream

__all__ = ["generate", "stream"]
