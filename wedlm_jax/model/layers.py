"""The layers of a Qwen2.5 / Qwen3 transformer. Parameters carry the names of their axes, which `sharding.py` reads."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from wedlm_jax.model.config import ModelConfig
from wedlm_jax.model.kv_cache import KVCache
from wedlm_jax.model.patterns import CachedWindow, Pattern
from wedlm_jax.model.rope import apply_rope
from wedlm_jax.ops.rms_norm import rms_norm
from wedlm_jax.ops.swiglu import swiglu
from wedlm_jax.sharding import constrain

EMBEDDING_STDDEV = 0.02


def residual_stddev(config: ModelConfig, fan_in: int) -> float:
    """Layers that write to the residual stream start small, so that depth does not blow it up (GPT-2's scaling)."""
    return (fan_in * 2 * config.num_layers) ** -0.5


class Linear(nnx.Module):
    """einsum(`equation`, x, kernel) + bias in the compute dtype, for all tokens T of x [B, L, ...].

    The one place that knows how a parameter is annotated.
    """

    def __init__(
        self,
        config: ModelConfig,
        equation: str,
        shape: tuple[int, ...],
        axes: tuple[str, ...],
        *,
        stddev: float,
        bias: bool = False,
        rngs: nnx.Rngs,
    ):
        self.equation, self.dtype = equation, config.dtype
        init = nnx.initializers.normal(stddev)
        self.kernel = nnx.Param(init(rngs.params(), shape, config.param_dtype), axes=axes)
        self.bias = nnx.Param(jnp.zeros(shape[1:], config.param_dtype), axes=axes[1:]) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        # One axis of tokens: XLA on CPU would write both factors of the kernel's gradient anew, transposed, to sum over two.
        tokens = x.reshape(-1, *x.shape[2:])
        y = jnp.einsum(self.equation, tokens, self.kernel[...].astype(self.dtype))
        y = y.reshape(*x.shape[:2], *y.shape[1:])
        return y if self.bias is None else y + self.bias[...].astype(self.dtype)


class RMSNorm(nnx.Module):
    """x / rms(x) * scale over the last axis, in float32 (arXiv 1910.07467)."""

    def __init__(self, config: ModelConfig, dim: int, axis: str):
        self.eps, self.dtype = config.rms_norm_eps, config.dtype
        self.scale = nnx.Param(jnp.ones((dim,), config.param_dtype), axes=(axis,))

    def __call__(self, x: jax.Array) -> jax.Array:
        return rms_norm(x.astype(self.dtype), self.scale[...], self.eps)


class Embedding(nnx.Module):
    """A table [rows, D]; `axis` names its rows."""

    def __init__(self, config: ModelConfig, rows: int, axis: str, *, rngs: nnx.Rngs):
        init = nnx.initializers.normal(EMBEDDING_STDDEV)
        self.dtype, self.axis = config.dtype, axis
        shape = (rows, config.hidden_size)
        self.embedding = nnx.Param(init(rngs.params(), shape, config.param_dtype), axes=(axis, "embed"))

    def __call__(self, ids: jax.Array) -> jax.Array:
        """[B, L, D] of ids [B, L]; an id past the table reads its last row."""
        # Whole along D before the look-up: the rows of a batch are cut over the same devices as D.
        table = constrain(self.embedding[...].astype(self.dtype), self.axis, None)
        return constrain(table[ids], "batch", None, None)


class Attention(nnx.Module):
    """Grouped-query attention, with RoPE if `rope` is given; queries and keys are normalised first in Qwen3."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        D, N, K, H = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
        self.implementation = config.attention
        inputs = dict(stddev=D**-0.5, bias=config.qkv_bias, rngs=rngs)
        self.q_proj = Linear(config, "TD,DNH->TNH", (D, N, H), ("embed", "heads", "head_dim"), **inputs)
        self.k_proj = Linear(config, "TD,DKH->TKH", (D, K, H), ("embed", "kv_heads", "head_dim"), **inputs)
        self.v_proj = Linear(config, "TD,DKH->TKH", (D, K, H), ("embed", "kv_heads", "head_dim"), **inputs)
        stddev = residual_stddev(config, fan_in=N * H)
        self.o_proj = Linear(config, "TNH,NHD->TD", (N, H, D), ("heads", "head_dim", "embed"), stddev=stddev, rngs=rngs)
        self.q_norm = RMSNorm(config, H, "head_dim") if config.qk_norm else None
        self.k_norm = RMSNorm(config, H, "head_dim") if config.qk_norm else None

    def __call__(
        self,
        x_BLD: jax.Array,
        *,
        rope: tuple[jax.Array, jax.Array] | None,
        pattern: Pattern,
        cache: KVCache | None,
        layer: jax.Array,
    ) -> tuple[jax.Array, KVCache | None]:
        q, k, v = self.q_proj(x_BLD), self.k_proj(x_BLD), self.v_proj(x_BLD)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:
            q, k = apply_rope(q, *rope), apply_rope(k, *rope)
        q = constrain(q, "batch", None, "heads", None)
        k, v = (constrain(x, "batch", None, "kv_heads", None) for x in (k, v))
        if isinstance(pattern, CachedWindow):
            assert cache is not None
            out, cache = pattern(q, k, v, self.implementation, cache=cache, layer=layer)
        else:
            out = pattern(q, k, v, self.implementation)
        return self.o_proj(out), cache


class MLP(nnx.Module):
    """SwiGLU (arXiv 2002.05202)."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        D, F = config.hidden_size, config.intermediate_size
        self.gate_proj = Linear(config, "TD,DF->TF", (D, F), ("embed", "mlp"), stddev=D**-0.5, rngs=rngs)
        self.up_proj = Linear(config, "TD,DF->TF", (D, F), ("embed", "mlp"), stddev=D**-0.5, rngs=rngs)
        stddev = residual_stddev(config, fan_in=F)
        self.down_proj = Linear(config, "TF,FD->TD", (F, D), ("mlp", "embed"), stddev=stddev, rngs=rngs)

    def __call__(self, x_BLD: jax.Array) -> jax.Array:
        x_BLF = swiglu(self.gate_proj(x_BLD), self.up_proj(x_BLD))
        return self.down_proj(constrain(x_BLF, "batch", None, "mlp"))


class Layer(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.input_norm = RMSNorm(config, config.hidden_size, "embed")
        self.attention = Attention(config, rngs=rngs)
        self.post_attention_norm = RMSNorm(config, config.hidden_size, "embed")
        self.mlp = MLP(config, rngs=rngs)

    def __call__(
        self,
        x_BLD: jax.Array,
        *,
        rope: tuple[jax.Array, jax.Array] | None,
        pattern: Pattern,
        cache: KVCache | None,
        layer: jax.Array,
    ) -> tuple[jax.Array, KVCache | None]:
        mixed, cache = self.attention(self.input_norm(x_BLD), rope=rope, pattern=pattern, cache=cache, layer=layer)
        x_BLD = constrain(x_BLD + mixed, "batch", None, None)
        return constrain(x_BLD + self.mlp(self.post_attention_norm(x_BLD)), "batch", None, None), cache
