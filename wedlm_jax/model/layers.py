"""The layers of a Qwen2.5, Qwen3 or Llama transformer. Parameters carry the names of their axes, which `sharding.py` reads."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental.layout import Layout, with_layout_constraint

from wedlm_jax.model.adapter import Target
from wedlm_jax.model.config import ModelConfig
from wedlm_jax.model.kv_cache import KVCache
from wedlm_jax.model.patterns import CachedWindow, Pattern, of_read
from wedlm_jax.model.rope import apply_rope
from wedlm_jax.ops.int8 import to_int8
from wedlm_jax.ops.rms_norm import rms_norm
from wedlm_jax.ops.rows_by_matrix import rows_by_matrix
from wedlm_jax.ops.single_row import by_matrix_unit
from wedlm_jax.ops.swiglu import swiglu
from wedlm_jax.ops.tiles import by_tiles
from wedlm_jax.sharding import constrain, cut_for_batch, over_mesh, whole_for_batch

# The rows to which an adapter applies: none, all, or those where bool [B, L] is True.
AdaptedRows = bool | jax.Array


def residual_stddev(config: ModelConfig, fan_in: int) -> float:
    """Layers that write to the residual stream start small, so that depth does not blow it up (GPT-2's scaling)."""
    return (fan_in * 2 * config.num_layers) ** -0.5


class Linear(nnx.Module):
    """einsum(`equation`, x, kernel) + bias in the compute dtype, for all tokens T of x [B, L, ...]; on the adapted rows, where
    it is a target of the model's adapter, also scale * (x A) B."""

    def __init__(
        self,
        config: ModelConfig,
        equation: str,
        shape: tuple[int, ...],
        axes: tuple[str, ...],
        *,
        stddev: float,
        bias: bool = False,
        target: Target | None = None,
        rngs: nnx.Rngs,
    ):
        self.equation, self.axes, self.dtype = equation, axes, config.dtype
        self.turned = self.joined = self.heads_first = False
        init = nnx.initializers.normal(stddev)
        kernel, inputs = init(rngs.params(), shape, config.param_dtype), len(_inputs_and_outputs(equation)[0])
        kernel_scale, self.outputs = None, shape[inputs:]
        if config.kernel_dtype == "int8":
            kernel, scale = to_int8(kernel, range(inputs))
            kernel_scale = nnx.Param(scale, axes=axes[inputs:])
        self.kernel, self.kernel_scale = nnx.Param(kernel, axes=axes), nnx.data(kernel_scale)
        self.bias = nnx.Param(jnp.zeros(shape[1:], config.param_dtype), axes=axes[1:]) if bias else None
        adapter, lora_a, lora_b = config.adapter, None, None
        if adapter is not None and target in adapter.targets:
            init = nnx.initializers.normal(math.prod(shape[:inputs]) ** -0.5)
            # In float32 whatever the base is in: these are what is trained.
            a = init(rngs.adapter(), (*shape[:inputs], adapter.rank), jnp.float32)
            lora_a = nnx.Param(a, axes=(*axes[:inputs], "rank"))
            lora_b = nnx.Param(jnp.zeros((adapter.rank, *shape[inputs:]), jnp.float32), axes=("rank", *axes[inputs:]))
            self.scale = adapter.scale
        self.lora_a, self.lora_b = lora_a, lora_b

    def __call__(self, x: jax.Array, adapted: AdaptedRows = False) -> jax.Array:
        return project([self], x, adapted)[0]

    def turn(self) -> None:
        """From now on the kernel lies one output after the other, [outputs, inputs], as `rows_by_matrix` takes it. For layers
        that decode: nothing that trains, saves or exports parameters knows it."""
        kernel, inputs = self.kernel[...], len(_inputs_and_outputs(self.equation)[0])
        self.turned = True
        self.kernel = nnx.Param(kernel.reshape(math.prod(kernel.shape[:inputs]), -1).T)

    def put_heads_first(self) -> None:
        """From now on the kernel of queries, keys or values is [N, D, H], in the stack of all layers too. A TPU lays arrays out
        by tiles of their last two axes, and multiplies with tiles of D and H: a stack of kernels [D, N, H] it would write anew in
        every call of a program. For layers that decode, as `turn`."""
        inputs, heads, head_dim = self.axes
        self.heads_first, self.axes = True, (heads, inputs, head_dim)
        self.kernel = nnx.Param(jnp.swapaxes(self.kernel[...], -3, -2))

    def product(self, tokens: jax.Array, batch: int = 1) -> jax.Array:
        """Of tokens [T, ...] with the kernel alone, however it lies; `batch`: the rows that they are of."""
        kernel = self.kernel[...]
        if self.kernel_scale is None:
            kernel = kernel.astype(self.dtype)  # before it is gathered, which int8 is as it is
        # Of int8: on accelerators XLA widens it as the product reads it.
        kernel = whole_for_batch(kernel, self.axes, batch).astype(self.dtype)
        if self.heads_first:
            # So that XLA asks no other order of the stack, for many tokens neither. By each device of its own part: the
            # partitioner, which does not look inside, would gather the kernel for it.
            cut, layout = cut_for_batch(self.axes, batch), Layout(major_to_minor=(0, 1, 2))
            (kernel,) = over_mesh(lambda x: (with_layout_constraint(x, layout),), [cut], [cut], kernel)
        accumulated = None if self.kernel_scale is None else jnp.float32

        def product(tokens: jax.Array) -> jax.Array:
            if self.turned:
                return rows_by_matrix(tokens.reshape(len(tokens), -1), kernel).reshape(len(tokens), *self.outputs)
            if self.heads_first:
                return jnp.einsum("TD,NDH->TNH", tokens, kernel, preferred_element_type=accumulated)
            return _product(self.equation, tokens, kernel, accumulated)

        y = by_matrix_unit(product, tokens)
        return (y if self.kernel_scale is None else y * self.kernel_scale[...]).astype(self.dtype)

    def biased(self, y: jax.Array) -> jax.Array:
        """What the base gives, of the product."""
        # Added in float32, so that its gradient, a sum over all tokens, is summed in float32 too.
        return y if self.bias is None else (y.astype(jnp.float32) + self.bias[...]).astype(self.dtype)

    def delta(self, x_TR: jax.Array) -> jax.Array:
        """What the adapter adds, of x A."""
        assert self.lora_b is not None
        outputs = _inputs_and_outputs(self.equation)[1]
        return jnp.einsum(f"TR,R{outputs}->T{outputs}", x_TR, (self.scale * self.lora_b[...]).astype(self.dtype))


def project(linears: Sequence[Linear], x: jax.Array, adapted: AdaptedRows) -> list[jax.Array]:
    """The outputs of layers that read the same x [B, L, ...]. Their products with A are one: narrow ones cost as much each."""
    # One axis of tokens: XLA on CPU would write both factors of the kernel's gradient anew, transposed, to sum over two.
    tokens = x.reshape(-1, *x.shape[2:])
    pairs = [linear.lora_a for linear in linears if linear.lora_a is not None]
    parts: list[jax.Array] = []
    if adapted is not False and pairs:
        # Before the kernels' products, so that the backward pass adds up theirs first, and A's, whose input devices that cut
        # the outputs have to sum, last: of hidden states they sum one then, not one for each kernel.
        a = jnp.concatenate([pair[...] for pair in pairs], axis=-1).astype(linears[0].dtype)
        parts = jnp.split(_product(linears[0].equation, tokens, a), len(pairs), axis=-1)
    outputs = [linear.biased(y) for linear, y in zip(linears, products_of(linears, tokens, len(x)), strict=True)]
    for number, linear in enumerate(linears):
        if parts and linear.lora_a is not None:
            outputs[number] = _where(adapted, outputs[number] + linear.delta(parts.pop(0)), outputs[number])
    return [y.reshape(*x.shape[:2], *y.shape[1:]) for y in outputs]


def join(linears: Sequence[Linear]) -> None:
    """From now on the first holds the kernels of all, [inputs, outputs of all], of layers that read the same x: a GPU reads one
    large matrix at a higher rate than its parts, and for one token XLA writes out what it multiplies with a small one before it
    adds it up (benchmarks/RESULTS.md, "On a GPU"). For layers that decode, as `Linear.turn`."""
    kernels = [linear.kernel[...] for linear in linears]
    linears[0].kernel = nnx.Param(jnp.concatenate([kernel.reshape(len(kernel), -1) for kernel in kernels], axis=1))
    if linears[0].kernel_scale is not None:
        scales = [linear.kernel_scale[...] for linear in linears if linear.kernel_scale is not None]
        linears[0].kernel_scale = nnx.Param(jnp.concatenate([scale.ravel() for scale in scales]))
    for linear in linears[1:]:
        del linear.kernel, linear.kernel_scale
    for linear in linears:
        linear.joined = True


def products_of(linears: Sequence[Linear], tokens: jax.Array, batch: int = 1) -> list[jax.Array]:
    """`Linear.product` of each, of layers that read the same tokens, joined or not."""
    if not linears[0].joined:
        return [linear.product(tokens, batch) for linear in linears]
    sizes = [math.prod(linear.outputs) for linear in linears]
    parts = jnp.split(linears[0].product(tokens), np.cumsum(sizes)[:-1], axis=1)
    return [y.reshape(len(tokens), *linear.outputs) for linear, y in zip(linears, parts, strict=True)]


def _where(adapted: AdaptedRows, with_adapter: jax.Array, of_base: jax.Array) -> jax.Array:
    """By row of [T, ...]. A choice instead of a sum with 0, so that the rows of the base keep every bit, a -0 too."""
    if isinstance(adapted, bool):
        return with_adapter if adapted else of_base
    chosen = jnp.where(adapted.reshape(-1, *[1] * (of_base.ndim - 1)), with_adapter, of_base)
    # So that it is not rewritten together with what reads it. A CPU's compiler drops the barrier before it forms its loops.
    return jax.lax.optimization_barrier(chosen)


def _product(
    equation: str, tokens: jax.Array, kernel: jax.Array, accumulated: type[jnp.float32] | None = None
) -> jax.Array:
    """Summed over the inputs of `equation` in the order in which they lie. An einsum sums in that of the letters, H before N, for
    which XLA on CPU writes the whole kernel anew, transposed, in every call."""
    axes = len(_inputs_and_outputs(equation)[0])
    return jnp.tensordot(tokens, kernel, axes=axes, preferred_element_type=accumulated)


def _inputs_and_outputs(equation: str) -> tuple[str, str]:
    """The letters of a kernel's axes that are summed over, and those of the outputs."""
    kernel, outputs = equation.partition(",")[2].split("->")
    return kernel.removesuffix(outputs[1:]), outputs[1:]


class RMSNorm(nnx.Module):
    """`rms_norm` with a learned scale (arXiv 1910.07467)."""

    def __init__(self, config: ModelConfig, dim: int, axis: str):
        self.eps, self.dtype = config.rms_norm_eps, config.dtype
        self.scale = nnx.Param(jnp.ones((dim,), config.param_dtype), axes=(axis,))

    def __call__(self, x: jax.Array) -> jax.Array:
        return rms_norm(x.astype(self.dtype), self.scale[...], self.eps)


class Attention(nnx.Module):
    """Grouped-query attention, with RoPE if `rope` is given; queries and keys are normalised first in Qwen3."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        D, N, K, H = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
        self.implementation = config.attention
        stddev, bias = D**-0.5, config.qkv_bias
        of_q, of_kv = ("embed", "heads", "head_dim"), ("embed", "kv_heads", "head_dim")
        self.q_proj = Linear(
            config, "TD,DNH->TNH", (D, N, H), of_q, stddev=stddev, bias=bias, target="q_proj", rngs=rngs
        )
        self.k_proj = Linear(
            config, "TD,DKH->TKH", (D, K, H), of_kv, stddev=stddev, bias=bias, target="k_proj", rngs=rngs
        )
        self.v_proj = Linear(
            config, "TD,DKH->TKH", (D, K, H), of_kv, stddev=stddev, bias=bias, target="v_proj", rngs=rngs
        )
        of_o, stddev = ("heads", "head_dim", "embed"), residual_stddev(config, fan_in=N * H)
        self.o_proj = Linear(config, "TNH,NHD->TD", (N, H, D), of_o, stddev=stddev, target="o_proj", rngs=rngs)
        self.q_norm = RMSNorm(config, H, "head_dim") if config.qk_norm else None
        self.k_norm = RMSNorm(config, H, "head_dim") if config.qk_norm else None

    def __call__(
        self,
        x_BLD: jax.Array,
        *,
        rope: tuple[jax.Array, jax.Array] | None,
        pattern: Pattern,
        cache: KVCache | None,
        layer: jax.Array | int,
        adapted: AdaptedRows = False,
    ) -> tuple[jax.Array, KVCache | None]:
        q, k, v = self.queries_keys_values(x_BLD, rope, adapted)
        if isinstance(pattern, CachedWindow):
            assert cache is not None
            out, cache = pattern(q, k, v, self.implementation, cache=cache, layer=layer)
        else:
            out = pattern(q, k, v, self.implementation)
        return self.o_proj(out, of_read(pattern, adapted)), cache

    def queries_keys_values(
        self, x_BLD: jax.Array, rope: tuple[jax.Array, jax.Array] | None, adapted: AdaptedRows = False
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """q [B, L, N, H], k and v [B, L, K, H], as attention reads them."""
        q, k, v = project([self.q_proj, self.k_proj, self.v_proj], x_BLD, adapted)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:
            q, k = apply_rope(q, *rope), apply_rope(k, *rope)
        q = constrain(q, "batch", None, "heads", None)
        k, v = (constrain(x, "batch", None, "kv_heads", None) for x in (k, v))
        return q, k, v


class MLP(nnx.Module):
    """SwiGLU (arXiv 2002.05202)."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        D, F = config.hidden_size, config.intermediate_size
        inward, stddev = ("embed", "mlp"), D**-0.5
        self.gate_proj = Linear(config, "TD,DF->TF", (D, F), inward, stddev=stddev, target="gate_proj", rngs=rngs)
        self.up_proj = Linear(config, "TD,DF->TF", (D, F), inward, stddev=stddev, target="up_proj", rngs=rngs)
        outward, stddev = ("mlp", "embed"), residual_stddev(config, fan_in=F)
        self.down_proj = Linear(config, "TF,FD->TD", (F, D), outward, stddev=stddev, target="down_proj", rngs=rngs)

    def __call__(self, x_BLD: jax.Array, adapted: AdaptedRows = False) -> jax.Array:
        gate, up = project([self.gate_proj, self.up_proj], x_BLD, adapted)
        return self.down_proj(constrain(swiglu(gate, up), "batch", None, "mlp"), adapted)


class Layer(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.input_norm = RMSNorm(config, config.hidden_size, "embed")
        self.attention = Attention(config, rngs=rngs)
        self.post_attention_norm = RMSNorm(config, config.hidden_size, "embed")
        self.mlp = MLP(config, rngs=rngs)
        self.mlp_tile = config.mlp_tile

    def join(self) -> None:
        """`join`s the kernels that read the same rows, for decoding."""
        join([self.attention.q_proj, self.attention.k_proj, self.attention.v_proj])
        join([self.mlp.gate_proj, self.mlp.up_proj])

    def __call__(
        self,
        x_BLD: jax.Array,
        *,
        rope: tuple[jax.Array, jax.Array] | None,
        pattern: Pattern,
        cache: KVCache | None,
        layer: jax.Array | int,
        adapted: AdaptedRows = False,
    ) -> tuple[jax.Array, KVCache | None]:
        x_normed = self.input_norm(x_BLD)
        mixed, cache = self.attention(x_normed, rope=rope, pattern=pattern, cache=cache, layer=layer, adapted=adapted)
        return self.after_attention(of_read(pattern, x_BLD), mixed, of_read(pattern, adapted)), cache

    def after_attention(self, x_BLD: jax.Array, mixed_BLD: jax.Array, adapted: AdaptedRows = False) -> jax.Array:
        x_BLD = constrain(x_BLD + mixed_BLD, "batch", None, None)

        def mlp(x_BLD: jax.Array, adapted: AdaptedRows = adapted) -> jax.Array:
            return self.mlp(self.post_attention_norm(x_BLD), adapted)

        rows = () if isinstance(adapted, bool) else (adapted,)
        return constrain(x_BLD + by_tiles(mlp, self.mlp_tile, x_BLD, *rows), "batch", None, None)
