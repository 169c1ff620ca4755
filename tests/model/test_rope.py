import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.model.tiny import TINY, logits_of, params
from wedlm_jax.model import rope
from wedlm_jax.model.patterns import Causal
from wedlm_jax.model.rope import apply_rope, rope_angles

H, THETA = 8, 10_000.0


def rotate(vector, position):
    """RoFormer in complex numbers: pair i turns by position * theta^(-2 i / H)."""
    half = len(vector) // 2
    pairs = vector[:half] + 1j * vector[half:]
    turned = pairs * np.exp(1j * position * THETA ** (-2 * np.arange(half) / len(vector)))
    return np.concatenate([turned.real, turned.imag])


def test_rope_turns_each_pair_by_its_position():
    random = np.random.default_rng(0)
    x, positions = random.normal(size=(2, 3, 2, H)), np.array([[0, 1, 5], [900, 2, 31]])
    ours = apply_rope(jnp.asarray(x, jnp.float32), *rope_angles(jnp.asarray(positions), H, THETA))
    for row, slot, head in np.ndindex(2, 3, 2):
        np.testing.assert_allclose(ours[row, slot, head], rotate(x[row, slot, head], positions[row, slot]), atol=2e-4)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_on_a_tpu_the_same_rotation_and_gradient_to_the_bit(monkeypatch, dtype):
    random = np.random.default_rng(0)
    x, d_out = (jnp.asarray(random.normal(size=(2, 5, 3, 64)), dtype) for _ in range(2))
    angles = rope_angles(jnp.asarray(random.integers(0, 9000, (2, 5))), 64, 1e6)

    def rotation_and_gradient():
        out, pullback = jax.vjp(lambda x: apply_rope(x, *angles), x)
        return out, pullback(d_out)[0]

    by_halves = rotation_and_gradient()
    monkeypatch.setattr(rope, "target_platform", lambda: "tpu")
    for ours, theirs in zip(rotation_and_gradient(), by_halves, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_scores_depend_on_relative_positions_only():
    random = np.random.default_rng(0)
    q, k = (jnp.asarray(random.normal(size=(1, 1, 1, H)), jnp.float32) for _ in range(2))

    def score(query_position, key_position):
        turned = [
            apply_rope(x, *rope_angles(jnp.array([[p]]), H, THETA)) for x, p in ((q, query_position), (k, key_position))
        ]
        return float(jnp.vdot(*turned))

    assert score(7, 3) == pytest.approx(score(107, 103), abs=1e-4)
    assert abs(score(7, 3) - score(7, 4)) > 1e-3


def test_a_forward_pass_depends_on_relative_positions_only():
    tokens, positions = jnp.arange(16)[None], jnp.arange(16)[None]
    logits, shifted, stretched = (
        logits_of(TINY, params(), tokens, p, Causal()) for p in (positions, positions + 500, 2 * positions)
    )
    np.testing.assert_allclose(shifted, logits, atol=1e-3)
    assert np.abs(stretched - logits).max() > 0.1


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_angles_are_float32_and_the_rotation_keeps_the_dtype(dtype):
    cos, sin = rope_angles(jnp.array([[257]]), H, THETA)
    assert cos.dtype == sin.dtype == jnp.float32
    np.testing.assert_allclose(cos[0, 0], np.cos(257 * THETA ** (-np.arange(0, H, 2) / H)), atol=1e-4)
    assert apply_rope(jnp.ones((1, 1, 2, H), dtype), cos, sin).dtype == dtype


def test_a_bfloat16_model_tells_position_257_from_256():
    assert jnp.bfloat16(257) == jnp.bfloat16(256), "the trap: angles computed in bfloat16 would be the same"
    low = dataclasses.replace(TINY, dtype="bfloat16", param_dtype="bfloat16")
    first, second = (
        logits_of(low, params(low), jnp.array([[1, 2]]), jnp.array([[0, p]]), Causal()) for p in (256, 257)
    )
    assert np.abs(first - second).max() > 0.05
