"""Who sees whom: the three attention patterns of the one forward pass.

Positions belong to RoPE alone. A pattern reads physical indices and segment ids, never positions: after reordering the two
disagree, and a mask made from positions would be silently wrong. `physical_index` counts along memory from the start of a
document; without masks it is the position.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import chex
import jax
import jax.numpy as jnp

from wedlm_jax.model.kept_blocks import KeptBlocks
from wedlm_jax.model.kv_cache import KVCache
from wedlm_jax.ops.attention import (
    DENSE_BLOCK,
    FEW_QUERIES,
    Implementation,
    OwnBlocks,
    attend,
    attend_cache,
    attend_ranges,
    choice,
    choose,
    flash_gpu,
    merge,
    splash,
    splash_backward,
    split_gpu,
    target_platform,
    trial,
    window_tpu,
)
from wedlm_jax.ops.attention.choice import Shaped
from wedlm_jax.ops.attention.dense import is_exact
from wedlm_jax.sharding import attend_over_mesh, axes_over, over_mesh, repeat_heads


def _static(default: Any = dataclasses.MISSING) -> Any:
    return dataclasses.field(default=default, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Causal:
    """Plain causal attention by physical index, inside documents where `segment_ids` [B, L] says so."""

    segment_ids: jax.Array | None = None

    def __call__(
        self, q_BLNH: jax.Array, k_BLKH: jax.Array, v_BLKH: jax.Array, implementation: Implementation = "auto"
    ) -> jax.Array:
        return _attend(self, splash.CausalMask(q_BLNH.shape[1]), implementation, q_BLNH, k_BLKH, v_BLKH)

    def by_ranges(self, q_BLNH: jax.Array, k_BLKH: jax.Array, v_BLKH: jax.Array) -> jax.Array:
        return attend_ranges(q_BLNH, k_BLKH, v_BLKH, *self.ranges(*q_BLNH.shape[:2]))[0]

    def by_flash(self, q_BLNH: jax.Array, k_BLKH: jax.Array, v_BLKH: jax.Array) -> jax.Array:
        return flash_gpu.flash_attention(q_BLNH, k_BLKH, v_BLKH, *self.ranges(*q_BLNH.shape[:2]))

    def by_splash(
        self, q_BLNH: jax.Array, k_BLKH: jax.Array, v_BLKH: jax.Array, attend: Callable[..., jax.Array]
    ) -> jax.Array:
        return attend(q_BLNH, k_BLKH, v_BLKH, self.segment_ids, splash.CausalMask(q_BLNH.shape[1]))

    def ranges(self, rows: int, length: int) -> tuple[jax.Array, jax.Array]:
        """Of every query the first key that it sees and the one after the last, int [B, L] each."""
        end = jnp.broadcast_to(jnp.arange(1, length + 1), (rows, length))
        return (jnp.zeros_like(end) if self.segment_ids is None else document_starts(self.segment_ids)), end

    def physical_index(self, length: int) -> jax.Array:
        """int [1 or B, L]."""
        index = jnp.arange(length)[None]
        return index if self.segment_ids is None else index - document_starts(self.segment_ids)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DualStream:
    """Eq. 8 and 9: a row of length 2L = [memory stream, prediction stream], both over the same packed documents.

    The memory stream is causal inside each document. The prediction stream is cut into blocks of `block_size`; each of its
    tokens sees the memory tokens of its document before its block and, causally, its own block. It never sees another
    prediction block. Documents start on a multiple of `block_size` and their pads (segment 0) come last in a block.

    `in_block="bidirectional"` lets the tokens of a block see each other both ways (the paper's ablation, Figure 5c). With `kept`
    the prediction stream is these blocks alone, and a row as much shorter.
    """

    segment_ids: jax.Array  # [B, L]; 0 = padding
    block_size: int = _static()
    in_block: Literal["causal", "bidirectional"] = _static("causal")
    kept: KeptBlocks | None = None

    def __call__(self, q: jax.Array, k: jax.Array, v: jax.Array, implementation: Implementation = "auto") -> jax.Array:
        length = self.segment_ids.shape[1]
        chex.assert_is_divisible(length, self.block_size)
        chex.assert_axis_dimension(q, 1, length + self.of_prediction(self.segment_ids).shape[1])
        mask = splash.TwoStreamMask(length, self.block_size, self.in_block == "bidirectional")
        return _attend(self, mask, implementation, q, k, v)

    def of_prediction(self, x: jax.Array) -> jax.Array:
        """Of an array [B, L, ...] what belongs to the tokens of the prediction stream."""
        return x if self.kept is None else self.kept.take(x)

    def by_ranges(self, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        """Both streams over the memory, the prediction blocks over themselves, merged by log-sum-exp."""
        length = self.segment_ids.shape[1]
        (k_memory, k_prediction), (v_memory, v_prediction) = (jnp.split(x, [length], axis=1) for x in (k, v))
        start, end = (
            jnp.concatenate([memory, self.of_prediction(prediction)], axis=1)
            for memory, prediction in zip(*self.ranges(), strict=True)
        )
        out, lse = attend_ranges(q, k_memory, v_memory, start, end)
        inside = self._attend_block(q[:, length:], self._own_blocks(k_prediction, v_prediction))
        prediction = merge(*inside, out[:, length:], lse[:, length:])
        return jnp.concatenate([out[:, :length], prediction], axis=1)

    def by_flash(self, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        """A call for each stream; the prediction blocks' own keys go in as further keys of theirs."""
        (q_memory, q_prediction), (k_memory, k_prediction), (v_memory, v_prediction) = (
            jnp.split(x, 2, axis=1) for x in map(self.in_places, (q, k, v))
        )
        of_memory, (start, end) = self.ranges()
        if self.kept is not None:
            end = jnp.where(self.kept.there(end.shape[1]), end, start)
        own = dataclasses.replace(self, kept=None)._own_blocks(k_prediction, v_prediction)
        # In float32 both streams' gradients of the memory are added before they are rounded.
        k_memory, v_memory = (x.astype(jnp.float32) for x in (k_memory, v_memory))
        memory = flash_gpu.flash_attention(q_memory, k_memory, v_memory, *of_memory)
        prediction = flash_gpu.flash_attention(q_prediction, k_memory, v_memory, start, end, own)
        return jnp.concatenate([memory, self.of_prediction(prediction)], axis=1)

    def by_splash(self, q: jax.Array, k: jax.Array, v: jax.Array, attend: Callable[..., jax.Array]) -> jax.Array:
        """One call for both streams, `attend(q, k, v, segment_ids, mask)`; our own kernels take kept blocks as they lie."""
        length, of_prediction = self.segment_ids.shape[1], self.segment_ids
        blocks = self.block_size, self.in_block == "bidirectional"
        if self.kept is not None:
            mask = splash.KeptMask(length, q.shape[1] - length, *blocks)
            if splash.unsupported(q, k, mask) is None and _own_kernels(q, k, "kept"):
                both = ((self.segment_ids, of_prediction), tuple(end for _, end in self.ranges()))
                segment_ids, reach = (jnp.concatenate([x, self.of_prediction(y)], axis=1) for x, y in both)
                return attend(q, k, v, segment_ids, mask, reach, own_kernels=True)
            of_prediction = jnp.where(self.kept.there(length), of_prediction, 0)  # what is not kept counts as padding
        segment_ids = jnp.concatenate([self.segment_ids, of_prediction], axis=1)
        out = attend(*map(self.in_places, (q, k, v)), segment_ids, splash.TwoStreamMask(length, *blocks))
        if self.kept is None:
            return out
        return jnp.concatenate([out[:, :length], self.kept.take(out[:, length:])], axis=1)

    def in_places(self, x: jax.Array) -> jax.Array:
        """[B, 2L, ...]: every block in its place, where kernels want it whose tiles are by place; zeros for one not kept."""
        if self.kept is None:
            return x
        length = self.segment_ids.shape[1]
        return jnp.concatenate([x[:, :length], self.kept.put(x[:, length:], length)], axis=1)

    def ranges(self) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
        """(start, end), int [B, L] each, of the memory keys that a memory query sees and that a prediction query sees."""
        start, end = Causal(self.segment_ids).ranges(*self.segment_ids.shape)
        return (start, end), (start, jnp.broadcast_to(self._block_starts(start.shape[1]), start.shape))

    def block_ranges(self) -> tuple[jax.Array, jax.Array]:
        """(start, end), int each, of the prediction keys that each prediction query sees: inside its block."""
        segment_ids = self.of_prediction(self.segment_ids)
        start, end = Causal(segment_ids).ranges(*segment_ids.shape)
        block_starts = self._block_starts(segment_ids.shape[1])
        if self.in_block == "bidirectional":
            end = jnp.minimum(block_starts + self.block_size, document_ends(segment_ids))
        return jnp.maximum(start, block_starts), end

    def _own_blocks(self, k_prediction: jax.Array, v_prediction: jax.Array) -> OwnBlocks:
        return OwnBlocks(k_prediction, v_prediction, *self.block_ranges(), size=self.block_size)

    def _attend_block(self, q: jax.Array, own: OwnBlocks) -> tuple[jax.Array, jax.Array]:
        if own.size > DENSE_BLOCK:  # a whole document
            return attend_ranges(q, own.k_BTKH, own.v_BTKH, own.start_BT, own.end_BT)
        out, lse = attend(*own.by_block(q))
        return out.reshape(q.shape), lse.reshape(q.shape[:3])

    def _block_starts(self, length: int) -> jax.Array:
        index = jnp.arange(length)
        return index - index % self.block_size

    def physical_index(self, length: int) -> jax.Array:
        """int [B, tokens of a row]: each stream counts for itself, and reordering moves tokens inside their block alone."""
        index = Causal(self.segment_ids).physical_index(self.segment_ids.shape[1])
        return jnp.concatenate([index, self.of_prediction(index)], axis=1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CachedWindow:
    """T tokens behind a cache: row b's tokens take the slots length[b] + 0 .. T - 1 and see every slot up to their own.

    Prefill is the same with length 0. The window is written before it is read, so one key range per query says it all. Where
    only some tokens are `read`, the last layer needs queries of these alone, and of the others keys and values. Rows that are
    `idle` see one slot, whatever they hold: else the others would pay for it, as the longest context is what all rows read.
    """

    length: jax.Array  # [B]: the cursor, the number of committed slots
    read: jax.Array | None = None  # int [B, M], in [0, T): the tokens whose hidden states are wanted; None: all
    idle: jax.Array | None = None  # bool [B]: rows of which no hidden state is wanted; None: none of them

    def __call__(
        self, q: jax.Array, k: jax.Array, v: jax.Array, implementation: Implementation = "auto",
        *, cache: KVCache, layer: jax.Array | int,
    ) -> tuple[jax.Array, KVCache]:  # fmt: skip
        end = of_read(self, self.physical_index(q.shape[1])) + 1
        if self.idle is not None:
            end = jnp.where(self.idle[:, None], 1, end)
        q = of_read(self, q)

        def write_and_attend(q, k, v, k_cache, v_cache, length, end, layer):
            cache = KVCache(k_cache, v_cache).write(layer, length, k, v)
            chosen = self._choose(implementation, q, cache.k)
            return attend_cache(q, cache.k, cache.v, layer, end, implementation=chosen), cache.k, cache.v

        # Every device has its rows and heads of the cache. Where the tensor axis does not divide them, it has them all.
        k, v = (repeat_heads(x, cache.k.shape[2]) for x in (k, v))
        heads, kv_heads = ("heads", "kv_heads") if axes_over("kv_heads", k.shape[2]) else (None, None)
        rows, in_cache = ("batch", None, kv_heads, None), (None, "batch", kv_heads, None, None)
        out, *cached = over_mesh(
            write_and_attend,
            (("batch", None, heads, None), rows, rows, in_cache, in_cache, ("batch",), ("batch", None), ()),
            (("batch", None, heads, None), in_cache, in_cache),
            *(q, k, v, cache.k, cache.v, self.length, end, jnp.asarray(layer)),
        )
        return out, KVCache(*cached)

    @staticmethod
    def _choose(asked: Implementation, q: jax.Array, k_cache: jax.Array) -> str:
        """How a window is attended on a device, an `implementation` of `attend_cache`: neither splash nor tokamax reads a cache,
        and kernels of ours stand for them. XLA's way is taken for a prompt, which has many queries, and for splash off a TPU."""
        if q.shape[1] > FEW_QUERIES or (asked == "splash" and target_platform() != "tpu"):
            return "xla"
        kernels = {"tokamax": split_gpu, "splash": window_tpu}
        unsupported = {name: kernel.unsupported(q, k_cache) for name, kernel in kernels.items()}
        heads = _tried(q, k_cache.shape[2])
        failures = {
            "tokamax": functools.partial(trial.failure, "split", *heads),
            "splash": functools.partial(trial.failure, "window", *heads),
        }
        names = {"tokamax": "split_gpu", "splash": "window_tpu"}
        return choose("auto" if asked == "splash" else asked, unsupported, failures=failures, kernels=names)

    def physical_index(self, window: int) -> jax.Array:
        """int [B, T]: the cache slots that the window takes."""
        return self.length[:, None] + jnp.arange(window)[None, :]


Pattern = Causal | DualStream | CachedWindow
Rows = TypeVar("Rows", jax.Array, jax.Array | bool)


def of_read(pattern: Pattern, x: Rows) -> Rows:
    """Of an array [B, T, ...] what belongs to the tokens that the pattern reads; a bool that holds for all stays."""
    if not isinstance(pattern, CachedWindow) or pattern.read is None or isinstance(x, bool):
        return x
    return jnp.take_along_axis(x, jnp.expand_dims(pattern.read, range(2, x.ndim)), axis=1)


def reading_all(pattern: Pattern) -> Pattern:
    """The pattern of a layer that another one follows, which needs all tokens."""
    return dataclasses.replace(pattern, read=None) if isinstance(pattern, CachedWindow) else pattern


def _attend(
    pattern: Causal | DualStream, mask: splash.Mask, implementation: Implementation,
    q: jax.Array, k: jax.Array, v: jax.Array,
) -> jax.Array:  # fmt: skip
    """By the chosen implementation, on every device its own rows and heads."""

    own_size = pattern.block_size if isinstance(pattern, DualStream) else 0

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, pattern: Causal | DualStream) -> jax.Array:
        # As kernels get them: with every block in its place.
        q_wide, k_wide = (jax.ShapeDtypeStruct((x.shape[0], mask.tokens, *x.shape[2:]), x.dtype) for x in (q, k))
        q_stream, k_stream = (x.update(shape=(x.shape[0], mask.length, *x.shape[2:])) for x in (q_wide, k_wide))
        unsupported = {
            "splash": splash.unsupported(q_wide, k_wide, mask),
            "tokamax": flash_gpu.unsupported(q_stream, k_stream, own_size),
        }
        failures = {"tokamax": functools.partial(trial.failure, "flash", *_tried(q, k.shape[2]))}
        match choose(implementation, unsupported, failures=failures):
            case "splash":
                own, interpret = _own_kernels(q_wide, k_wide), target_platform() != "tpu"
                by_splash = functools.partial(splash.splash_attention, own_kernels=own, interpret=interpret)
                return pattern.by_splash(q, k, v, by_splash)
            case "tokamax":
                return pattern.by_flash(q, k, v)
            case _:
                return pattern.by_ranges(q, k, v)

    return attend_over_mesh(attend, q, k, v, pattern)


def _own_kernels(q: Shaped, k: Shaped, kernels: Literal["splash", "kept"] = "splash") -> bool:
    """Whether splash runs by our kernels. Their trial decides where a TPU is, and else they are taken: interpreted, or compiled
    for a TPU that is not there."""
    reason = splash_backward.unsupported(k)
    if reason is None and jax.default_backend() == "tpu":
        reason = trial.failure(kernels, *_tried(q, k.shape[2]))
    if reason is not None:
        otherwise = {"splash": "splash by jax's kernels", "kept": "splash with all blocks in their places"}
        choice.log_once(otherwise[kernels], f"because of ours: {reason}", falls_back=True)
    return reason is None


def _tried(q: Shaped, kv_heads: int) -> tuple[Any, ...]:
    """For which heads, and in which numbers, `trial.failure` tries kernels."""
    return q.shape[2], kv_heads, q.shape[3], q.dtype, is_exact(q.dtype)


def document_starts(segment_ids: jax.Array) -> jax.Array:
    """int [B, L]: where the run of equal segment ids that each token of [B, L] is in begins."""
    index = jnp.arange(segment_ids.shape[1])
    begins = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)))
    return jax.lax.cummax(jnp.where(begins, index, 0), axis=1)


def document_ends(segment_ids: jax.Array) -> jax.Array:
    """int [B, L]: where the run that each token is in is over."""
    return segment_ids.shape[1] - document_starts(segment_ids[:, ::-1])[:, ::-1]
