"""The splash kernels, interpreted, against dense float64 attention: outputs, gradients, and which tiles they visit."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from benchmarks import correctness
from tests.conftest import FULL, examples
from tests.ops.visited_pairs import visited_pairs
from tests.quick_jit import quick_jit
from tests.reference.attention import attention, attention_gradients
from wedlm_jax.model.patterns import DualStream
from wedlm_jax.ops.attention import splash_backward
from wedlm_jax.ops.attention.ranges import RESIDUALS
from wedlm_jax.ops.attention.splash import (
    CausalMask,
    KeptMask,
    TwoStreamMask,
    splash_attention,
    unsupported,
)
from wedlm_jax.ops.attention.splash_kept import steps_of
from wedlm_jax.program_costs import matmul_flops
from wedlm_jax.sharding import MeshConfig, attend_over_mesh, batch_sharding, make_mesh, on_mesh

# Documents of a row; each starts on a multiple of the block size, what is left is padding.
PACKINGS = {"one": [1.0], "aligned": [0.25, 0.5, 0.25], "ragged": [0.2, 0.33, 0.01, 0.3], "empty": []}


def segment_ids(documents, length, block_size):
    row, start = np.zeros(length, np.int32), 0
    for segment, share in enumerate(documents):
        size = min(max(int(share * length), 1), length - start)
        row[start : start + size] = segment + 1
        start += -(-size // block_size) * block_size
    return row


def dense(mask, segments_BL):
    """bool [B, T, T], written from the docstrings; padding sees itself alone."""
    length, streams = mask.length, mask.tokens // mask.length
    seen = np.zeros((mask.tokens, mask.tokens), bool)
    for query in range(mask.tokens):
        for key in range(mask.tokens):
            if query < length or key >= length:
                seen[query, key] = (key <= query) if query < length else same_block(mask, query, key)
            else:
                seen[query, key] = key // mask.block_size < (query - length) // mask.block_size
    segments_BT = np.tile(segments_BL, (1, streams))
    same = (segments_BT[:, :, None] == segments_BT[:, None, :]) & (segments_BT > 0)[:, :, None]
    return (seen & same) | np.eye(mask.tokens, dtype=bool), segments_BT > 0


def same_block(mask, query, key):
    return query // mask.block_size == key // mask.block_size and (mask.bidirectional or key <= query)


def arrays(rows, tokens, heads, kv_heads, head_dim, seed=0):
    random = np.random.default_rng(seed)
    shapes = [(rows, tokens, n, head_dim) for n in (heads, kv_heads, kv_heads, heads)]
    return [np.float32(random.normal(size=shape)) for shape in shapes]


KERNELS_OF = {"our kernels": True, "jax's": False}
each_implementation = pytest.mark.parametrize("own", KERNELS_OF.values(), ids=KERNELS_OF)


@functools.partial(quick_jit, static_argnames=("mask", "own"))
def output_and_gradients(q, k, v, d_out, segments, mask, own=True):
    attend = functools.partial(splash_attention, mask=mask, own_kernels=own, interpret=True)
    if segments is not None:
        segments = jnp.tile(segments, (1, mask.tokens // mask.length))
    function = lambda q, k, v: attend(q, k, v, segments)  # noqa: E731
    out, pullback = jax.vjp(function, q, k, v)
    return out, *pullback(d_out)


KERNELS = ("forward", "dq", "dkv", "joint")
CASES = {  # mask, documents of each row, heads, kv heads, head dim
    "causal": (CausalMask(256), ["ragged", "one"], 2, 1, 64),
    "blocks of 32": (TwoStreamMask(256, 32), ["ragged", "aligned"], 2, 2, 64),
    "blocks of 4, GQA 4": (TwoStreamMask(128, 4), ["ragged"], 4, 1, 128),
    "bidirectional blocks of 8": (TwoStreamMask(128, 8, bidirectional=True), ["ragged"], 2, 1, 64),
}
if FULL:
    CASES |= {
        "blocks of 24": (TwoStreamMask(384, 24), ["ragged"], 2, 1, 64),
        "blocks of 1": (TwoStreamMask(128, 1), ["ragged"], 2, 1, 64),
    }
    for length, block_size, bidirectional in itertools.product((192, 256, 512), (4, 8, 32), (False, True)):
        for kv_heads, head_dim in ((4, 128), (2, 64), (1, 128)):
            mask = TwoStreamMask(length, block_size, bidirectional)
            CASES[f"{mask} {kv_heads=} {head_dim=}"] = (mask, ["ragged", "aligned", "empty"], 4, kv_heads, head_dim)


@each_implementation
@pytest.mark.parametrize(("mask", "packings", "heads", "kv_heads", "head_dim"), CASES.values(), ids=CASES)
def test_splash_is_dense_attention_with_gradients(mask, packings, heads, kv_heads, head_dim, own):
    block_size = getattr(mask, "block_size", 32)
    segments = np.stack([segment_ids(PACKINGS[name], mask.length, block_size) for name in packings])
    visible, real = dense(mask, segments)
    q, k, v, d_out = arrays(len(packings), mask.tokens, heads, kv_heads, head_dim)
    d_out = d_out * real[:, :, None, None]  # nothing is asked of padding
    out, *gradients = output_and_gradients(q, k, v, d_out, segments, mask, own)
    assert np.isfinite(out).all()
    assert_close(np.asarray(out)[real], attention(q, k, v, visible)[0][real])
    for ours, expected in zip(gradients, attention_gradients(q, k, v, visible, d_out), strict=True):
        assert_close(ours, expected)


def assert_close(ours, expected):
    assert np.max(np.abs(ours - expected), initial=0) <= 1e-5 * np.max(np.abs(expected), initial=1e-30)


@pytest.mark.skipif(not FULL, reason="with --full")
@pytest.mark.parametrize("documents", [[0.11, 0.05, 0.3, 0.002, 0.2, 0.15], [1.0]], ids=["six documents", "one"])
def test_the_largest_tiles_agree_with_key_ranges(documents):
    """Those of rows of 4,096 tokens, which dense attention in float64 would take too long for."""
    segments = jnp.asarray(segment_ids(documents, 4096, 32)[None])
    real = np.tile(segments > 0, 2)[:, :, None, None]
    q, k, v, d_out = arrays(1, 2 * 4096, 2, 1, 64)

    @functools.partial(jax.jit, static_argnames="implementation")
    def by(implementation):
        pattern = functools.partial(DualStream(segments, 32), implementation=implementation)
        out, pullback = jax.vjp(pattern, q, k, v)
        return out * real, *pullback(d_out * real)

    for ours, expected in zip(by("splash"), by("xla"), strict=True):
        assert_close(ours, expected)


@pytest.mark.parametrize(("head_dim", "kv_heads", "block_size"), [(64, 2, 4), (128, 1, 32)])
def test_bfloat16_is_as_exact_as_dense_attention_in_bfloat16(head_dim, kv_heads, block_size):
    paths = {"splash": correctness.by("splash")}
    errors = correctness.of_dual_stream(paths, 128, head_dim, 2, kv_heads, block_size)["splash"]
    assert max(errors) <= correctness.ALLOWED


@each_implementation
def test_no_segments_are_one_segment(own):
    mask = TwoStreamMask(128, 8)
    q, k, v, d_out = arrays(1, mask.tokens, 2, 1, 64)
    one = np.ones((1, mask.length), np.int32)
    for ours, expected in zip(
        output_and_gradients(q, k, v, d_out, None, mask, own),
        output_and_gradients(q, k, v, d_out, one, mask, own),
        strict=True,
    ):
        np.testing.assert_array_equal(ours, expected)


@pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices (tests/conftest.py asks for them)")
def test_eight_devices_give_what_one_gives():
    """On the mesh each device runs the kernel on its row and its two of four heads; one kv head is shared by two devices."""
    mask = TwoStreamMask(128, 32)
    mesh = make_mesh(MeshConfig(data=1, fsdp=4, tensor=2))
    segments = np.stack([segment_ids(PACKINGS[name], mask.length, 32) for name in PACKINGS])
    q, k, v, d_out = arrays(4, mask.tokens, 4, 1, 64)
    expected = output_and_gradients(q, k, v, d_out, segments, mask)

    @quick_jit
    def on_eight(q, k, v, d_out, segments):
        with on_mesh(mesh):
            attend = functools.partial(splash_attention, mask=mask, own_kernels=True, interpret=True)
            of_both = jnp.tile(segments, (1, 2))
            out, pullback = jax.vjp(lambda q, k, v: attend_over_mesh(attend, q, k, v, of_both), q, k, v)
            return out, *pullback(d_out)

    found = on_eight(*jax.device_put((q, k, v, d_out, segments), batch_sharding(mesh)))
    for ours, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, wanted, atol=1e-6 * np.abs(wanted).max())


@each_implementation
def test_a_remat_policy_keeps_the_residuals(own):
    """With them kept, the backward pass runs the kernels of the backward pass alone, else the forward again."""
    mask = CausalMask(128)
    q, k, v, _ = arrays(1, mask.tokens, 2, 1, 64)
    segments = np.ones((1, mask.length), np.int32)

    def calls(policy):
        attend = lambda q, k, v: splash_attention(q, k, v, segments, mask, own_kernels=own, interpret=True)  # noqa: E731
        loss = lambda *qkv: jnp.sum(jax.checkpoint(attend, policy=policy)(*qkv))  # noqa: E731
        return str(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1, 2)))(q, k, v)).count("pallas_call[")

    backward = 1 if own else 2
    assert calls(jax.checkpoint_policies.nothing_saveable) == 2 + backward
    assert calls(jax.checkpoint_policies.save_only_these_names(RESIDUALS)) == 1 + backward


@pytest.mark.parametrize("mask", [CausalMask(1024), TwoStreamMask(1024, 32), TwoStreamMask(4096, 32)])
def test_tiles_in_vain_are_few(mask):
    pairs = visited_pairs(mask)
    assert pairs["useful"] == pytest.approx(mask.tokens**2 / 2 / (mask.tokens // mask.length), rel=0.01)
    for kernel in KERNELS:
        assert pairs[kernel] <= 1.3 * pairs["useful"], kernel


@each_implementation
def test_what_is_declared_of_the_kernels_is_not_of_the_loop_over_rows(own):
    """Of a loop without a trip count in the compiled text the declared number is taken."""
    q, k, v, _ = arrays(3, 256, 2, 1, 64)
    attend = functools.partial(
        splash_attention, segment_ids_BT=None, mask=CausalMask(256), own_kernels=own, interpret=True
    )
    [loop] = [equation for equation in jax.make_jaxpr(attend)(q, k, v).eqns if equation.primitive.name == "scan"]
    assert loop.params["length"] == 3 and "kernel_runs" not in str(loop.source_info.name_stack)
    inside = [str(equation.source_info.name_stack) for equation in loop.params["jaxpr"].jaxpr.eqns]
    assert any("kernel_runs" in stack for stack in inside)


@pytest.mark.parametrize(
    "products",
    [{"forward": 2, "joint": 5}, {"forward": 2, "dq": 3, "dkv": 4}],
    ids=KERNELS_OF,
)
def test_the_products_of_the_visited_tiles_are_counted_on_every_device(products):
    """Those of each kernel for each visited pair and head."""
    mask, rows, heads, head_dim = TwoStreamMask(256, 32), 4, 4, 64
    q, k, v, d_out = arrays(rows, mask.tokens, heads, 2, head_dim)
    segments = np.ones((rows, mask.tokens), np.int32)
    attend = functools.partial(splash_attention, mask=mask, own_kernels="joint" in products)

    def on(mesh):
        def gradients(q, k, v, d_out):
            with on_mesh(mesh):
                return jax.vjp(lambda q, k, v: attend_over_mesh(attend, q, k, v, segments), q, k, v)[1](d_out)

        return matmul_flops(jax.make_jaxpr(gradients)(q, k, v, d_out).jaxpr)

    pairs = visited_pairs(mask)
    expected = rows * heads * sum(2 * head_dim * n * pairs[kernel] for kernel, n in products.items())
    if "joint" not in products:  # there jax multiplies output and gradient by an einsum
        expected += rows * heads * mask.tokens * 2 * head_dim
    assert on(make_mesh(MeshConfig(data=1), jax.devices()[:1])) == expected
    if jax.device_count() >= 8:
        assert on(make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))) == expected


@pytest.mark.parametrize("mask", [CausalMask(2048), TwoStreamMask(2048, 32)])
def test_documents_are_visited_one_by_one(mask):
    """Six documents of a row cost little more than what each sees, not what one document of that length sees."""
    documents = segment_ids([1 / 6 - 0.01] * 6, mask.length, 32)
    whole, packed = visited_pairs(mask), visited_pairs(mask, documents)
    assert packed["useful"] < 0.18 * whole["useful"]
    for kernel in KERNELS:
        assert packed[kernel] < 0.5 * whole[kernel], kernel


def test_rows_whose_gradients_a_chip_cannot_hold_are_told():
    k = jax.ShapeDtypeStruct((1, 2**16, 1, 128), jnp.bfloat16)
    assert splash_backward.unsupported(k) == "65536 keys of 128 are too many for a chip's memory"
    assert splash_backward.unsupported(jax.ShapeDtypeStruct((1, 2**14, 8, 128), jnp.bfloat16)) is None


def test_our_kernels_are_not_taken_on_chips_of_little_memory_though_the_rows_of_a_trial_would_fit():
    k = jax.ShapeDtypeStruct((2, 1024, 8, 128), jnp.bfloat16)
    for kind, reason in (("TPU v4", "a core of a TPU v4 has too little memory of its own"), ("TPU v5 lite", None)):
        chip = AbstractDevice(device_kind=kind, num_cores=1, platform="tpu")
        with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("data",), abstract_device=chip)):
            assert splash_backward.unsupported(k) == reason


def test_shapes_that_the_kernel_cannot_do_are_told_with_the_reason():
    def reason(mask, tokens=256, heads=2, kv_heads=1, dtype=jnp.float32):
        q, k = (jax.ShapeDtypeStruct((1, tokens, n, 64), dtype) for n in (heads, kv_heads))
        return unsupported(q, k, mask)

    assert reason(CausalMask(256)) is None and reason(TwoStreamMask(128, 32), dtype=jnp.bfloat16) is None
    assert reason(TwoStreamMask(100, 4), tokens=200) == "rows of 200 are not a multiple of 128"
    assert reason(CausalMask(128)) == "256 queries and 256 keys; it takes 128 of both"
    assert reason(TwoStreamMask(128, 48)) == "blocks of 48 do not divide a stream of 128"
    assert reason(CausalMask(256), heads=3, kv_heads=2) == "2 key heads do not divide 3 query heads"
    assert reason(CausalMask(256), dtype=jnp.float16) == "float16 is neither float32 nor bfloat16"
    assert reason(KeptMask(128, 128, 32)) is None
    assert reason(KeptMask(192, 64, 32)) == "streams of 192 and 64 are not multiples of 128"
    with jax.default_matmul_precision("high"):
        assert reason(CausalMask(256)) == "its kernels multiply at matmul_precision default or highest, not high"
    with jax.default_matmul_precision("highest"):
        assert reason(CausalMask(256)) is None
    with pytest.raises(ValueError, match="splash attention: rows of 100"):
        splash_attention(*[jnp.zeros((1, 100, 1, 64))] * 3, None, CausalMask(100))


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("block_size", [32, 24])
def test_of_kept_blocks_what_is_seen_is_visited_and_what_is_not_masked_is_seen(block_size, bidirectional):
    """For random blocks of ragged documents, tile by tile of the schedule."""
    length, tile = 768, 128
    for seed in range(examples(4, 40)):
        random = np.random.default_rng(seed)
        kept = 384
        blocks = np.sort(random.choice(length // block_size, kept // block_size, replace=False))
        memory = segment_ids([random.uniform(0.05, 0.6) for _ in range(3)], length, block_size)[:length]
        place = (blocks[:, None] * block_size + np.arange(block_size)).ravel()
        segments = np.concatenate([memory, memory[place]])
        reach = np.concatenate([np.arange(1, length + 1), np.repeat(blocks * block_size, block_size)])
        mask, index = KeptMask(length, kept, block_size, bidirectional), np.arange(length + kept)
        seen = mask(index[:, None], index, reach[:, None]) & (segments[:, None] == segments)
        steps = steps_of(mask, jnp.asarray(segments), jnp.asarray(reach), tile)
        pairs = np.asarray(steps.pairs)[:, : int(steps.visited)]
        tiles = seen.reshape(len(index) // tile, tile, -1, tile)
        visited, whole = np.zeros((2, *tiles.shape[::2]), bool)
        visited[pairs[0], pairs[1]], whole[pairs[0], pairs[1]] = True, pairs[2] == 0
        real = tiles & (segments > 0).reshape(-1, tile)[:, :, None, None]
        assert visited[real.any(axis=(1, 3))].all() and tiles.all(axis=(1, 3))[whole].all()
        assert (np.diff(pairs[0]) >= 0).all() and set(pairs[0]) == set(
            range(len(tiles))
        )  # a tile of queries after the other


def test_all_blocks_kept_visit_the_tiles_of_the_whole_stream_and_a_quarter_fewer():
    length, tile = 4096, 512
    one = jnp.ones(2 * length, jnp.int32)
    place = np.arange(length)
    reach = jnp.asarray(np.concatenate([place + 1, place // 32 * 32]))
    whole = int(steps_of(KeptMask(length, length, 32), one, reach, tile).visited)
    assert whole * tile**2 == visited_pairs(TwoStreamMask(length, 32))["joint"]
    first = jnp.concatenate(
        [reach[:length], reach[length : length + length // 4]]
    )  # those of the first blocks of a row
    assert int(steps_of(KeptMask(length, length // 4, 32), one[: len(first)], first, tile).visited) == 36 + 3 + 2
