"""A function of each token by tiles is that function, and a backward pass holds one tile's values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.quick_jit import quick_jit
from wedlm_jax.ops.tiles import by_tiles
from wedlm_jax.program_costs import collectives
from wedlm_jax.sharding import MeshConfig, batch_sharding, make_mesh

D, F = 6, 10
RNG = np.random.default_rng(0)
INWARD, OUTWARD = (jnp.asarray(RNG.normal(size=shape), jnp.float32) for shape in ((D, F), (F, D)))


def mlp(inward, outward, x, *doubled):
    y = jnp.tanh(x @ inward) @ outward
    return jnp.where(doubled[0][..., None], 2 * y, y) if doubled else y


@pytest.mark.parametrize("with_rows", [False, True])
@pytest.mark.parametrize(("length", "tile"), [(12, 4), (12, 5), (13, 4), (7, 1), (5, 8), (5, 5)])
def test_values_and_gradients_are_those_of_all_at_once(length, tile, with_rows):
    x = jnp.asarray(RNG.normal(size=(2, length, D)), jnp.float32)
    rows = (jnp.asarray(RNG.random((2, length)) < 0.5),) if with_rows else ()

    def run(tile):
        def loss(inward, outward, x):
            y = by_tiles(lambda *given: mlp(inward, outward, *given), tile, x, *rows)
            return jnp.sum(y**2), y

        return quick_jit(jax.grad(loss, (0, 1, 2), has_aux=True))(INWARD, OUTWARD, x)

    (expected, y), (found, y_tiled) = run(None), run(tile)
    np.testing.assert_allclose(y_tiled, y, atol=1e-5)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-4)


def test_what_fills_the_last_tile_makes_no_nan():
    """Rows of zeros would, by a norm without an epsilon."""
    norm = lambda x: x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True))  # noqa: E731
    x = jnp.asarray(RNG.normal(size=(1, 5, D)), jnp.float32)
    found, expected = (jax.grad(lambda x: jnp.sum(by_tiles(norm, tile, x) ** 3))(x) for tile in (2, None))  # noqa: B023
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("length", [12, 13])
def test_over_a_mesh_that_cuts_rows_devices_send_each_other_nothing(length):
    mesh = make_mesh(MeshConfig(data=2), jax.devices()[:2])
    x = jax.ShapeDtypeStruct((4, length, D), jnp.float32, sharding=batch_sharding(mesh))
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(by_tiles(lambda x: x**2, 4, x)[:, 1:])), out_shardings=x.sharding)
    assert collectives(gradient.lower(x).compile().as_text()) == []


def test_no_tile_is_longer_than_asked_and_they_are_even():
    seen = []

    def function(x):
        seen.append(x.shape[1])
        return x

    assert by_tiles(function, 4, jnp.ones((1, 9, D))).shape == (1, 9, D)
    assert set(seen) == {3}


@pytest.mark.parametrize("policy", [None, jax.checkpoint_policies.dots_with_no_batch_dims_saveable])
def test_the_memory_of_a_gradient_is_that_of_one_tile_whatever_a_policy_would_keep(policy):
    length, width = 2048, 512
    inward, outward, x = jnp.ones((D, width)), jnp.ones((width, D)), jnp.ones((1, length, D))

    def temporaries(tile):
        def loss(inward, outward, x):
            run = lambda x: by_tiles(lambda x: mlp(inward, outward, x), tile, x)  # noqa: E731
            return jnp.sum(jax.checkpoint(run, policy=policy)(x) ** 2)

        return (
            jax.jit(jax.grad(loss, (0, 1, 2))).lower(inward, outward, x).compile().memory_analysis().temp_size_in_bytes
        )

    all_at_once = 4 * length * width
    assert temporaries(None) >= all_at_once
    assert temporaries(128) < all_at_once / 2
