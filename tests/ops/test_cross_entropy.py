import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import wedlm_jax.ops.cross_entropy as module
from tests.conftest import examples
from tests.quick_jit import quick_jit
from tests.reference.attention import cross_entropy as reference
from tests.reference.attention import cross_entropy_gradients as reference_gradients
from wedlm_jax.ops.cross_entropy import Cut, Tile, cross_entropy
from wedlm_jax.program_costs import collectives, matmul_flops
from wedlm_jax.sharding import MeshConfig, make_mesh

T, D, V = 23, 5, 40
PATTERNS = ("none", "all", "one", "some")


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles that divide neither T nor V, so that the last chunk is short and the last tile repeats columns."""
    monkeypatch.setattr(module, "CPU_TILE", Tile(4, 16))
    monkeypatch.setattr(module, "LANES", 1)


def arrays(rows=T, width=D, vocab=V, pattern="all", seed=0):
    """(hidden, head, targets, which rows carry a loss), then the gradient that comes back for the losses."""
    random = np.random.default_rng(seed)
    hidden, head = (random.normal(size=(size, width)).astype(np.float32) for size in (rows, vocab))
    carries = {
        "none": np.zeros(rows, bool),
        "all": np.ones(rows, bool),
        "one": np.arange(rows) == random.integers(rows),
        "some": random.random(rows) < random.random(),
    }[pattern]
    return (hidden, head, random.integers(0, vocab, rows), carries), random.normal(size=rows).astype(np.float32)


def losses_and_gradients(operands, d_losses, **how):
    hidden, head, targets, carries = operands
    losses, pullback = jax.vjp(lambda h, w: cross_entropy(h, w, targets, carries, **how), hidden, head)
    return losses, pullback(d_losses)


def plain(operands, d_losses):
    """The same by jax's own differentiation of all logits at once."""
    hidden, head, targets, carries = operands

    def losses_of(hidden, head):
        head = head.astype(hidden.dtype)
        logits = jnp.einsum("TD,VD->TV", hidden, head, preferred_element_type=jnp.float32)
        picked = jnp.take_along_axis(logits, targets[:, None], axis=1)[:, 0]
        return jnp.where(carries, jax.nn.logsumexp(logits, axis=1) - picked, 0.0)

    losses, pullback = jax.vjp(losses_of, hidden, head)
    return losses, pullback(d_losses)


def assert_equals_float64(results, operands, d_losses):
    hidden, head, targets, carries = operands
    losses, gradients = results
    np.testing.assert_allclose(losses, np.where(carries, reference(hidden, head, targets), 0), atol=2e-6, rtol=1e-6)
    wanted = reference_gradients(hidden, head, targets, np.where(carries, d_losses, 0))
    for ours, expected in zip(gradients, wanted, strict=True):
        np.testing.assert_allclose(ours, expected, atol=5e-6, rtol=1e-5)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_losses_and_gradients_equal_float64(small_tiles, pattern):
    operands, d_losses = arrays(pattern=pattern)
    assert_equals_float64(quick_jit(losses_and_gradients)(operands, d_losses), operands, d_losses)


@settings(max_examples=examples(4, 200))
@given(
    st.integers(1, 30), st.integers(1, 8), st.integers(2, 70), st.integers(1, 12), st.integers(1, 40),
    st.sampled_from(PATTERNS), st.integers(0, 1000),
)  # fmt: skip
def test_any_shape_in_any_tiles_equals_float64(rows, width, vocab, tile_rows, tile_vocab, pattern, seed):
    operands, d_losses = arrays(rows, width, vocab, pattern, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CPU_TILE", Tile(tile_rows, tile_vocab))
        patch.setattr(module, "LANES", 1)
        results = quick_jit(losses_and_gradients)(operands, d_losses)
    assert_equals_float64(results, operands, d_losses)


@pytest.mark.parametrize("count", [0, 1, 4, 5, 16, 17])
def test_as_many_chunks_run_as_the_rows_with_a_loss_fill(count):
    """What makes the time follow their number; and each gets its own result back."""
    carries = np.zeros(T, bool)
    carries[np.random.default_rng(0).permutation(T)[:count]] = True
    values = np.arange(1.0, T + 1, dtype=np.float32)

    @quick_jit
    def run(carries, values):
        chunks = module._Chunks.of(carries, Tile(4, V))
        ran = chunks.each(lambda n, ran: ran.at[n].add(1), jnp.zeros(len(chunks.rows_NC), int))
        return ran, chunks.in_order(10 * chunks.take(values))

    ran, results = run(carries, values)
    np.testing.assert_array_equal(ran, np.arange(len(ran)) < math.ceil(count / 4))
    np.testing.assert_array_equal(results, np.where(carries, 10 * values, 0))


def test_rows_without_a_loss_reach_nothing(small_tiles):
    operands, d_losses = arrays(pattern="some", seed=1)
    hidden, head, targets, carries = operands
    assert carries.any() and not carries.all()
    spoilt = np.where(carries[:, None], hidden, np.nan), head, np.where(carries, targets, 0), carries
    run = quick_jit(losses_and_gradients)
    for ours, expected in zip(
        jax.tree.leaves(run(spoilt, np.where(carries, d_losses, np.nan))), jax.tree.leaves(run(operands, d_losses)),
        strict=True,
    ):  # fmt: skip
        np.testing.assert_array_equal(ours, expected)


def test_bfloat16_errs_at_most_one_and_a_half_times_as_much_as_all_logits_at_once(small_tiles):
    operands, d_losses = arrays(rows=64, width=32, vocab=200, pattern="some")
    hidden, head, targets, carries = operands
    rounded = [jnp.asarray(x, jnp.bfloat16) for x in (hidden, head * 32**-0.5)]  # logits of a spread of 1
    exact = [np.asarray(x, np.float64) for x in rounded]
    wanted = [
        np.where(carries, reference(*exact, targets), 0),
        *reference_gradients(*exact, targets, np.where(carries, d_losses, 0)),
    ]

    def errors(function):
        losses, gradients = quick_jit(function)((*rounded, targets, carries), d_losses)
        assert losses.dtype == jnp.float32 and {x.dtype for x in gradients} == {jnp.dtype(jnp.bfloat16)}
        results = zip((losses, *gradients), wanted, strict=True)
        return np.array([np.linalg.norm(np.asarray(x, np.float64) - y) for x, y in results])

    assert (errors(losses_and_gradients) <= 1.5 * errors(plain) + 1e-6).all()


def test_the_gradient_of_a_float32_head_is_not_rounded_to_the_dtype_of_the_products():
    operands, d_losses = arrays()
    hidden = jnp.asarray(operands[0], jnp.bfloat16)
    _, (d_hidden, d_head) = quick_jit(losses_and_gradients)((hidden, *operands[1:]), d_losses)
    assert (d_hidden.dtype, d_head.dtype) == (jnp.bfloat16, jnp.float32)
    assert np.any(d_head != d_head.astype(jnp.bfloat16).astype(jnp.float32))


def test_logits_of_hundreds_do_not_overflow(small_tiles):
    (hidden, *rest), d_losses = arrays()
    losses, gradients = quick_jit(losses_and_gradients)((300 * hidden, *rest), d_losses)
    np.testing.assert_allclose(losses, reference(300 * hidden, *rest[:2]), rtol=1e-5, atol=1e-3)
    assert all(np.isfinite(x).all() for x in gradients)


def shapes_of(rows, width, vocab):
    floats = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((rows, width), (vocab, width), (rows,))]
    operands = *floats[:2], jax.ShapeDtypeStruct((rows,), jnp.int32), jax.ShapeDtypeStruct((rows,), bool)
    return operands, floats[2]


def largest_array(text: str) -> int:
    """Elements of the largest array that a compiled program names."""
    return max(math.prod(map(int, dims.split(","))) for dims in re.findall(r"\b[a-z]+\d+\[([\d,]+)\]", text))


def test_the_logits_of_all_rows_are_never_there():
    """16 rows of tiles by 32 of columns: neither a name in the program nor its memory has room for all of them."""
    rows, width, vocab = 2048, 8, 32768
    compiled = {f: quick_jit(f).lower(*shapes_of(rows, width, vocab)).compile() for f in (plain, losses_and_gradients)}
    arrays_named = {f: largest_array(one.as_text()) for f, one in compiled.items()}
    memory = {f: one.memory_analysis().temp_size_in_bytes for f, one in compiled.items()}
    assert arrays_named[plain] >= rows * vocab and memory[plain] >= 4 * rows * vocab, "the search can find them"
    assert arrays_named[losses_and_gradients] == vocab * width  # the head and its gradient
    assert memory[losses_and_gradients] < 8 * 2**20 < memory[plain] / 30


def test_forward_and_backward_are_four_products():
    """Logits, logits again, and the two gradients; kept between them is one number a row beside the operands."""
    rows, width, vocab = 256, 8, 2048
    traced = jax.make_jaxpr(losses_and_gradients)(*shapes_of(rows, width, vocab))
    assert matmul_flops(traced.jaxpr) == 4 * 2 * rows * width * vocab
    operands, _ = arrays(pattern="some")
    _, pullback = jax.vjp(lambda h, w: cross_entropy(h, w, *operands[2:]), *operands[:2])
    assert sorted(x.shape for x in jax.tree.leaves(pullback)) == sorted(((T, D), (V, D), (T,), (T,), (T,)))


def test_products_of_bfloat16_are_summed_in_float32_at_the_precision_that_is_asked_for():
    """Forward and backward; a CPU would sum them so anyway."""
    operands, d_losses = shapes_of(256, 8, 2048)
    operands = jax.ShapeDtypeStruct(operands[0].shape, jnp.bfloat16), *operands[1:]
    exact = functools.partial(losses_and_gradients, precision="highest")
    text = str(jax.make_jaxpr(exact)(operands, d_losses))
    products = re.findall(r":(\w+)\[[\d,]*\] = dot_general\[(.*?)\n +\] ", text, re.DOTALL)
    assert len(products) == 2 * 4  # for a CPU, and for all else
    for dtype, parameters in products:
        assert dtype == "f32" and "precision=(Precision.HIGHEST, Precision.HIGHEST)" in parameters


@pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices (tests/conftest.py asks for them)")
@pytest.mark.parametrize(
    ("mesh_config", "rows", "vocab", "width"),
    [
        (MeshConfig(data=1, fsdp=4, tensor=2), ("fsdp",), ("tensor",), ("fsdp",)),
        (MeshConfig(data=2, fsdp=1, tensor=4), ("data",), ("tensor",), ()),
        (MeshConfig(data=2, fsdp=4, tensor=1), ("data", "fsdp"), (), ("fsdp",)),
    ],
    ids=["fsdp-tensor", "data-tensor", "data-fsdp"],
)
def test_eight_devices_give_the_losses_and_gradients_of_one(monkeypatch, mesh_config, rows, vocab, width):
    monkeypatch.setattr(module, "CPU_TILE", Tile(3, 8))
    monkeypatch.setattr(module, "LANES", 1)
    operands, d_losses = arrays(rows=40, width=4, pattern="some")
    operands[3][:10] = False  # the first device has no row with a loss, the others unequal numbers
    mesh = make_mesh(mesh_config)
    cut = Cut(mesh.abstract_mesh, rows, vocab, width)
    specs = P(rows, None), P(vocab or None, width or None), P(rows), P(rows)
    places = tuple(NamedSharding(mesh, spec) for spec in specs), NamedSharding(mesh, P(rows))
    run = quick_jit(functools.partial(losses_and_gradients, cut=cut), in_shardings=places).lower(operands, d_losses)
    compiled = run.compile()
    losses, gradients = compiled(*jax.device_put((operands, d_losses), places))
    assert_equals_float64((losses, gradients), operands, d_losses)
    assert gradients[1].sharding.is_equivalent_to(places[0][1], 2), (
        "the gradient of the head is born cut as the head is"
    )
    held = V // mesh.shape["tensor"]
    tiles = -(-held // 8)
    found = [(one.kind, one.shape, one.times) for one in collectives(compiled.as_text())]
    # The head and its gradient cross a tile at a time, as often as there are tiles and no more: not for every chunk of rows,
    # whose number differs between devices. All else crosses once.
    of_tiles = [one for one in found if one[2] > 1]
    whole, cut_up = (-(-held // tiles), 4), (-(-held // tiles), 4 // (mesh.shape["fsdp"] if width else 1))
    expected = [("all-gather", whole, tiles), ("all-gather", whole, tiles), ("reduce-scatter", cut_up, tiles)]
    assert sorted(of_tiles) == (expected if width else []), "forward and backward gather, backward sums"
    assert all(kind == "all-reduce" for kind, _, times in found if times == 1), found
