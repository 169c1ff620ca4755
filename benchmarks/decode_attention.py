"""What attention of a decode step compiles to for a TPU that is not there: XLA's path, our kernel, jax's ragged paged attention.

    python -m benchmarks.decode_attention                      # Qwen3-8B's heads, 8 rows, a window of 16, 4096 slots

Compiled ahead of time with libtpu, never run: one layer's attention with the whole context in use. XLA's bytes are those of its
cost analysis, which knows nothing of kernels; to them come the operands and results of the kernels, each once: ours reads a
tile of a row once, jax's a page once for every block of queries, and a window is one block. Jax's wants keys and values
interleaved by head in one array; from a cache that keeps them apart, as ours does, they are first copied into that. The last
lines are of our window as a whole, written into the cache and attended, layer after layer.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import tyro
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention
from jax.sharding import Mesh

from benchmarks.side_by_side import print_table
from wedlm_jax import absent_devices
from wedlm_jax.errors import entry
from wedlm_jax.model.kv_cache import KVCache
from wedlm_jax.model.patterns import CachedWindow
from wedlm_jax.ops.attention import Implementation, attend_ranges, trial
from wedlm_jax.ops.attention.window_tpu import attend_window
from wedlm_jax.sharding import MeshConfig, make_mesh, on_mesh, replicated


@dataclasses.dataclass(frozen=True)
class Flags:
    topology: str = "v5e:1x1"
    rows: int = 8
    """B."""
    window: int = 16
    """T: tokens that are fed to each row."""
    slots: int = 4096
    """S."""
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    layers: int = 36
    """Of the cache, of which one is read."""
    page: int = 64
    """Slots of a page; a contiguous cache is pages in order."""


def by_xla(q_BTNH: jax.Array, k_LBKSH: jax.Array, v_LBKSH: jax.Array, layer: jax.Array, end_BT: jax.Array) -> jax.Array:
    """As `attend_cache` where the largest context is in use."""
    k_BSKH, v_BSKH = (jax.lax.dynamic_index_in_dim(x, layer, keepdims=False).swapaxes(1, 2) for x in (k_LBKSH, v_LBKSH))
    return attend_ranges(q_BTNH, k_BSKH, v_BSKH, jnp.zeros_like(end_BT), end_BT)[0]


def by_pages(q_BTNH: jax.Array, kv_PSCH: jax.Array, first_page: jax.Array, end_BT: jax.Array) -> jax.Array:
    """The kernel lets query t of T see the first `length - T + t + 1` keys: a window behind its context."""
    B, T, N, H = q_BTNH.shape
    page = kv_PSCH.shape[1]
    pages = FLAGS.slots // page
    indices = first_page + jnp.arange(B * pages, dtype=jnp.int32).reshape(B, pages)
    out = ragged_paged_attention(
        q_BTNH.reshape(B * T, N, H), kv_PSCH, end_BT[:, -1], indices, jnp.arange(B + 1, dtype=jnp.int32) * T,
        jnp.array([B], jnp.int32), sm_scale=H**-0.5, num_kv_pages_per_block=min(pages, 8), num_queries_per_block=T,
    )  # fmt: skip
    return out.reshape(q_BTNH.shape)


def by_pages_of_a_layer(q_BTNH: jax.Array, kv_PSCH: jax.Array, layer: jax.Array, end_BT: jax.Array) -> jax.Array:
    return by_pages(q_BTNH, kv_PSCH, layer * (FLAGS.rows * FLAGS.slots // FLAGS.page), end_BT)


def by_pages_copied(
    q_BTNH: jax.Array, k_LBKSH: jax.Array, v_LBKSH: jax.Array, layer: jax.Array, end_BT: jax.Array
) -> jax.Array:
    k_BSKH, v_BSKH = (jax.lax.dynamic_index_in_dim(x, layer, keepdims=False).swapaxes(1, 2) for x in (k_LBKSH, v_LBKSH))
    H = q_BTNH.shape[3]
    kv_PSCH = jnp.stack([k_BSKH, v_BSKH], axis=3).reshape(-1, FLAGS.page, 2 * FLAGS.kv_heads, H)
    return by_pages(q_BTNH, kv_PSCH, jnp.int32(0), end_BT)


def row(
    name: str, attend: Callable[..., jax.Array], mesh: Mesh, caches: list[tuple[int, ...]], kernel_bytes: float = 0
) -> list[str]:
    def array(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=replicated(mesh))

    def on_chip(*arguments: jax.Array) -> jax.Array:
        with on_mesh(mesh):
            return attend(*arguments)

    B, T, N, H = FLAGS.rows, FLAGS.window, FLAGS.heads, FLAGS.head_dim
    arguments = [array((B, T, N, H), jnp.bfloat16), *(array(shape, jnp.bfloat16) for shape in caches)]
    compiled = jax.jit(on_chip).lower(*arguments, array((), jnp.int32), array((B, T), jnp.int32)).compile()
    nbytes = compiled.cost_analysis()["bytes accessed"] + kernel_bytes
    temporaries = compiled.memory_analysis().temp_size_in_bytes
    bandwidth = absent_devices.chip_of(FLAGS.topology).hbm_bandwidth
    return [name, f"{nbytes / 1e6:.0f}", f"{temporaries / 1e6:.1f}", f"{1e6 * nbytes / bandwidth:.0f}"]


def written_and_read(mesh: Mesh, implementation: Implementation, layers: int = 4) -> str:
    """What `layers` windows, each written into its layer of the cache and attended behind it, cost as the body of a scan; what a
    kernel moves not counted."""

    def run(q: jax.Array, k: jax.Array, v: jax.Array, cache: KVCache, length: jax.Array) -> tuple[jax.Array, KVCache]:
        def layer(carry: tuple[jax.Array, KVCache], number: jax.Array) -> tuple[tuple[jax.Array, KVCache], None]:
            return CachedWindow(length)(carry[0], k, v, implementation, cache=carry[1], layer=number), None

        with on_mesh(mesh):
            return jax.lax.scan(layer, (q, cache), jnp.arange(layers))[0]

    B, T, S, K, H = FLAGS.rows, FLAGS.window, FLAGS.slots, FLAGS.kv_heads, FLAGS.head_dim
    shapes = [(B, T, FLAGS.heads, H), (B, T, K, H), (B, T, K, H), (layers, B, K, S, H), (layers, B, K, S, H)]
    at = dict(sharding=replicated(mesh))
    q, k, v, *cached = (jax.ShapeDtypeStruct(shape, jnp.bfloat16, **at) for shape in shapes)
    length = jax.ShapeDtypeStruct((B,), jnp.int32, **at)
    with mock.patch.object(trial, "failure", lambda *_: None):  # "auto" tries its kernel first, on a TPU that is here
        compiled = jax.jit(run, donate_argnums=3).lower(q, k, v, KVCache(*cached), length).compile()
    name = f"bf16[{','.join(map(str, shapes[-1]))}]"
    copies = sum(name in line and " copy(" in line for line in compiled.as_text().splitlines())
    return (
        f"A window written and attended, model.attention={implementation}, in {layers} layers of a cache of "
        f"{4 * math.prod(shapes[-1]) / 1e6:.0f} MB: {compiled.cost_analysis()['bytes accessed'] / 1e6:.0f} MB moved, "
        f"{compiled.memory_analysis().temp_size_in_bytes / 1e6:.0f} MB of temporaries, {copies} copies of the cache"
    )


@entry
def main() -> None:
    global FLAGS
    FLAGS = tyro.cli(Flags, description=__doc__)
    mesh = make_mesh(MeshConfig(), absent_devices.devices(FLAGS.topology))
    B, T, S, K, H = FLAGS.rows, FLAGS.window, FLAGS.slots, FLAGS.kv_heads, FLAGS.head_dim
    apart = [(FLAGS.layers, B, K, S, H)] * 2
    pages = [(FLAGS.layers * B * S // FLAGS.page, FLAGS.page, 2 * K, H)]
    flops = 4 * B * T * FLAGS.heads * H * S
    cache = 2 * 2 * B * S * K * H
    kernel_bytes = cache + 2 * 2 * B * T * FLAGS.heads * H  # queries in, outputs out
    rows = [
        row("XLA", by_xla, mesh, apart),
        row("our kernel", attend_window, mesh, apart, kernel_bytes),
        row("jax's, interleaved cache", by_pages_of_a_layer, mesh, pages, kernel_bytes),
        row("jax's, our cache copied for it", by_pages_copied, mesh, apart, kernel_bytes),
    ]
    title = (
        f"{FLAGS.topology}, {B} rows, {T} tokens each, {S} slots, {FLAGS.heads} / {K} heads of {H}, bfloat16: "
        f"{flops / 1e9:.1f} GFLOP, {cache / 1e6:.0f} MB of keys and values"
    )
    print_table(title, ["", "MB moved", "temporary MB", "least us of HBM"], rows)
    print()
    for implementation in ("xla", "auto"):
        print(written_and_read(mesh, implementation))


if __name__ == "__main__":
    main()
