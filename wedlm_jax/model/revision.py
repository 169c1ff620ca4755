"""A revision: which weights these are, as a text of 32 digits, so that an adapter is not put on others than it was trained on."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from wedlm_jax.model.adapter import split_adapter
from wedlm_jax.model.config import ModelConfig

_VERSION = 1  # of what is written below; another one gives other revisions
_READ = ("num_heads", "num_kv_heads", "rope_theta", "rms_norm_eps", "position_embedding_type", "tie_word_embeddings")


def revision(config: ModelConfig, params: Mapping[str, jax.Array]) -> str:
    """The revision of a base: of the names, shapes and values of all its parameters, and of what else its forward pass reads.

    Values count as rounded to bfloat16, so weights have one revision in both dtypes; a change that no weight shows in bfloat16 is
    not seen. An adapter beside the base, tokenizer and special ids do not enter, nor do the mesh and the file format: a
    workdir, its exports, and what is loaded from either agree. It tells versions apart; it is no signature.

    The weights are read once, where they lie: no parameter is gathered or comes to the host.
    """
    base, _ = split_adapter(params)
    tensors = {name: [*x.shape, *map(int, _words(x))] for name, x in base.items()}
    read = {name: getattr(config, name) for name in _READ}
    if config.rope_scaling is not None:
        read |= dataclasses.asdict(config.rope_scaling)
    read = {name: float(value) if isinstance(value, int) else value for name, value in read.items()}  # 10000 is 10000.0
    described = {"version": _VERSION, "tensors": tensors, **read}
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:32]


@jax.jit
def _words(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Two sums modulo 2^32 over a hash of each value and its place. Whole numbers throughout, so every order of summation and
    every device gives the same."""
    index = jnp.zeros(x.shape, jnp.uint32)
    for axis in range(x.ndim):
        stride = math.prod(x.shape[axis + 1 :]) % 2**32
        index += jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis) * jnp.uint32(stride)
    mixed = _mix(_bfloat16_bits(x) * jnp.uint32(0x9E3779B1) + index)
    zero = jnp.uint32(0)
    # One reduction of both: of two XLA would write `mixed`, as large as x, to memory for them to read.
    add = lambda sums, others: (sums[0] + others[0], sums[1] + others[1])  # noqa: E731
    return jax.lax.reduce((mixed, mixed * mixed), (zero, zero), add, tuple(range(x.ndim)))


def _bfloat16_bits(x: jax.Array) -> jax.Array:
    """The bits of x rounded to bfloat16, to nearest even; 0 of what is too small for a full mantissa: some devices drop it."""
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return jnp.where(rounded & 0x7F80, rounded, 0)


def _mix(x: jax.Array) -> jax.Array:
    """The last step of MurmurHash3 (A. Appleby): every bit of the input changes half of the output."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
