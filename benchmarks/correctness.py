"""Is every path of attention and loss that runs on this device as exact in bfloat16 as the plain dense one is?

    python -m benchmarks.correctness

Output and gradients of each path against the dense form in float32; the error (2-norm) may be at most 1.5 times that of the
dense form in bfloat16: both operands of every product, forward and backward, rounded to bfloat16, sums in float32. Packed,
ragged documents, padding, grouped heads. Ends with status 1 if one errs more. The tests run the same check on kernels that
are interpreted.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from benchmarks.loss import all_at_once
from benchmarks.side_by_side import compile_all, forward_and_backward, machine, print_table
from wedlm_jax.diffusion.dual_stream import visibility
from wedlm_jax.errors import entry
from wedlm_jax.model.patterns import DualStream
from wedlm_jax.ops.attention import Implementation, attend_cache, flash_gpu
from wedlm_jax.ops.cross_entropy import cross_entropy

ALLOWED = 1.5
CASES = ((64, 4, 4, 4), (128, 4, 1, 8), (128, 16, 8, 32))  # H, N, K, block size

Function = Callable[..., Any]
Path = Callable[..., jax.Array]  # (pattern, q, k, v) -> output


@dataclasses.dataclass(frozen=True)
class Flags:
    length: int = 1024
    """L: tokens of a row; a multiple of 128."""
    cases: int = len(CASES)
    """How many of them."""


@entry
def main() -> None:
    flags = tyro.cli(Flags, description=__doc__)
    paths, missing = paths_that_run()
    wrong: list[str] = []
    print_table(
        f"{machine()}; error in bfloat16 of what the dense form errs in bfloat16, L = {flags.length}; at most {ALLOWED}",
        ("path", "case", "output", "gradients"),
        checked(flags, paths, wrong),
    )
    print("", *missing, *wrong, sep="\n")
    sys.exit(bool(wrong))


def checked(flags: Flags, paths: Mapping[str, Path], wrong: list[str]) -> Iterator[tuple[str, ...]]:
    """The rows of the table, each as soon as it is there: a run that is cut off keeps them. Those that err more join `wrong`."""
    for path, case, ratios in measured(flags, paths):
        if not all(ratio <= ALLOWED for ratio in ratios):  # nan is wrong too
            wrong.append(f"WRONG: {path}, {case}")
        yield path, case, f"{ratios[0]:.2f}", " ".join(f"{ratio:.2f}" for ratio in ratios[1:])


def measured(flags: Flags, paths: Mapping[str, Path]) -> Iterator[tuple[str, str, list[float]]]:
    for head_dim, heads, kv_heads, block_size in CASES[: flags.cases]:
        case = f"H = {head_dim}, {heads} / {kv_heads} heads, blocks of {block_size}"
        found = of_dual_stream(paths, flags.length, head_dim, heads, kv_heads, block_size)
        yield from ((path, case, ratios) for path, ratios in found.items())
        ways = ("xla", "split_gpu") if jax.default_backend() == "gpu" else ("xla",)
        of_windows = of_cache(flags.length, head_dim, heads, kv_heads, ways)
        yield from zip(("attend_cache", "attend_cache, split"), itertools.repeat(case), ([x] for x in of_windows))
    yield "ops.cross_entropy", "half of the rows carry a loss", of_losses(flags.length)


def by(implementation: Implementation) -> Path:
    return lambda pattern, q, k, v: pattern(q, k, v, implementation)


def by_flash(kernels: flash_gpu.Kernels) -> Path:
    def run(pattern: DualStream, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        with mock.patch.object(flash_gpu, "_kernels_of_this_gpu", lambda dtype: kernels):
            return pattern.by_flash(q, k, v)

    return run


def paths_that_run() -> tuple[dict[str, Path], list[str]]:
    """Those of this device, and a line for each that cannot run on it."""
    paths = {"xla": by("xla")}
    if jax.default_backend() != "gpu":
        return paths, [f"Not run: the GPU kernels, on {jax.default_backend()}."]
    if importlib.util.find_spec("tokamax") is None:
        return paths, ["Not run: the GPU kernels, for tokamax is not installed (the `gpu` extra)."]
    paths["tokamax, triton"] = by_flash(flash_gpu.triton())
    if float(jax.devices()[0].compute_capability) != 9.0:
        return paths, ["Not run: the sm90 kernels, for this is no Hopper."]
    return paths | {"tokamax, sm90": by_flash(flash_gpu.sm90())}, []


def of_dual_stream(
    paths: Mapping[str, Path], length: int, head_dim: int, heads: int, kv_heads: int, block_size: int
) -> dict[str, list[float]]:
    """The errors of each path: of output, d_q, d_k and d_v."""
    segment_ids = jnp.asarray(np.stack([ragged(length, shares) for shares in ((0.3, 0.02, 0.5), (1.0,))]))
    pattern = DualStream(segment_ids, block_size)
    real = (jnp.tile(segment_ids, 2) > 0)[..., None, None]
    q, k, v, d_out = random_heads(2, 2 * length, head_dim, heads, kv_heads)
    plain = dense(visibility(segment_ids, block_size=block_size))

    def of_real(attention: Function) -> Function:
        """Nobody reads what padding computes."""
        return lambda *qkv: jnp.where(real, attention(*qkv), 0)

    ours = {name: of_real(functools.partial(path, pattern)) for name, path in paths.items()}
    return errors(ours, of_real(plain), (q, k, v), jnp.where(real, d_out, 0))


def of_cache(
    slots: int, head_dim: int, heads: int, kv_heads: int, ways: Sequence[str] = ("xla",), window: int = 16
) -> list[float]:
    """Of the output of a window behind an empty cache and of one behind a cache that is half full: the worse of the two, as the
    first errs several times as much and would hide the second. A figure for each way, an `implementation` of `attend_cache`."""
    q, k, v, _ = random_heads(2, slots, head_dim, heads, kv_heads)
    end = jnp.array([[1], [slots // 2]]) + jnp.arange(window)

    def through_cache(q: jax.Array, k: jax.Array, v: jax.Array, *, way: str) -> jax.Array:
        k_LBKSH, v_LBKSH = (x.swapaxes(1, 2)[None] for x in (k, v))
        return attend_cache(q, k_LBKSH, v_LBKSH, jnp.int32(0), end, implementation=way)

    def by_row(attention: Function) -> Function:
        return lambda *qkv: tuple(attention(*qkv))

    plain = dense(jnp.arange(slots) < end[..., None])
    ours = {way: by_row(functools.partial(through_cache, way=way)) for way in ways}
    of_ways = errors(ours, by_row(plain), (q[:, :window], k, v)).values()
    return [float(np.max(ratios)) for ratios in of_ways]  # nan if one is


def random_heads(rows: int, length: int, head_dim: int, heads: int, kv_heads: int) -> tuple[jax.Array, ...]:
    """q, k, v and the cotangent of the output."""
    random = np.random.default_rng(0)
    shapes = [(rows, length, n, head_dim) for n in (heads, kv_heads, kv_heads, heads)]
    return tuple(jnp.asarray(random.normal(size=shape), jnp.float32) for shape in shapes)


def dense(visible: jax.Array) -> Function:
    """Softmax attention (q [B, T, N, H], k and v [B, S, K, H]) under a mask [B, T, S], differentiated by jax."""

    def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        B, T, N, H = q.shape
        product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
        grouped = q.reshape(B, T, k.shape[2], -1, H)
        scores = _with_gradient_in(q.dtype, product("BTKGH,BSKH->BKGTS", grouped, k)) * H**-0.5
        weights = jax.nn.softmax(jnp.where(visible[:, None, None], scores, -1e30), axis=-1).astype(q.dtype)
        return product("BKGTS,BSKH->BTKGH", weights, v).astype(q.dtype).reshape(B, T, N, H)

    return attention


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _with_gradient_in(dtype: Any, x: jax.Array) -> jax.Array:
    """x; what comes back for it is rounded to `dtype`, because it is an operand of the next two products."""
    return x


def _rounded(dtype: Any, g: jax.Array) -> jax.Array:
    """Not by `astype` there and back, which XLA may leave out."""
    return jax.lax.reduce_precision(g, jnp.finfo(dtype).nexp, jnp.finfo(dtype).nmant)


_with_gradient_in.defvjp(lambda dtype, x: (x, None), lambda dtype, _, g: (_rounded(dtype, g),))


def ragged(length: int, shares: Sequence[float]) -> np.ndarray:
    """int [length]: documents of these shares, each from a multiple of 32 on; what is left is padding."""
    row, start = np.zeros(length, np.int32), 0
    for number, share in enumerate(shares, 1):
        size = round(share * length)
        row[start : start + size] = number
        start += -(-size // 32) * 32
    return row


def of_losses(rows: int, width: int = 512, vocab: int = 8192) -> list[float]:
    random = np.random.default_rng(0)
    hidden, head = (jnp.asarray(random.normal(size=(n, width)), jnp.float32) for n in (rows, vocab))
    targets, carries = jnp.asarray(random.integers(0, vocab, rows)), jnp.arange(rows) % 2 == 0
    d_losses = jnp.asarray(random.random(rows), jnp.float32)
    ours = lambda hidden, head: cross_entropy(hidden, head, targets, carries)  # noqa: E731
    plain = lambda hidden, head: all_at_once(hidden, head, targets, carries)  # noqa: E731
    return errors({"": ours}, plain, (hidden, head * width**-0.5), d_losses)[""]


def errors(
    ours: Mapping[str, Function], plain: Function, operands: tuple[jax.Array, ...], cotangent: jax.Array | None = None
) -> dict[str, list[float]]:
    """Of the result, and of each gradient if there is a cotangent: our error over the plain form's, both in bfloat16."""
    low = tuple(x.astype(jnp.bfloat16) for x in operands)
    if cotangent is not None:
        ours = {name: forward_and_backward(function) for name, function in ours.items()}
        plain = forward_and_backward(plain)
        # Losses are float32 whatever goes in, and so is what comes back for them.
        low = *low, cotangent if cotangent.ndim == 1 else cotangent.astype(jnp.bfloat16)
    # Of the rounded operands: what is lost by rounding them is nobody's error.
    with jax.default_matmul_precision("highest"):
        exact = jax.jit(plain).lower(*(x.astype(jnp.float32) for x in low))
    lowered = [jax.jit(function).lower(*low) for function in (plain, *ours.values())]
    # With every rounding that is written down: XLA would leave out some, of the plain form and of interpreted kernels.
    compiled = compile_all([exact, *lowered], {"xla_allow_excess_precision": False})
    expected = jax.tree.leaves(compiled.pop(0)(*(x.astype(jnp.float32) for x in low)))

    def distances(program: jax.stages.Compiled) -> list[float]:
        pairs = zip(jax.tree.leaves(program(*low)), expected, strict=True)
        return [float(jnp.linalg.norm((x.astype(jnp.float32) - y).ravel())) for x, y in pairs]

    theirs, *of_ours = map(distances, compiled)
    return {
        name: [mine / their for mine, their in zip(of_one, theirs, strict=True)]
        for name, of_one in zip(ours, of_ours, strict=True)
    }


if __name__ == "__main__":
    main()
