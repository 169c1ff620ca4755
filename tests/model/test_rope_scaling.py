"""RoPE for longer contexts: which pairs turn more slowly, and by how much (tests/hf/test_torch_parity.py: as in transformers)."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest

from tests.model.tiny import TINY
from wedlm_jax.errors import UserError
from wedlm_jax.model.rope import rope_angles
from wedlm_jax.model.rope_scaling import RopeScaling

HEAD_DIM, THETA = 64, 5e5
PLAIN = THETA ** -(np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
LLAMA3 = RopeScaling("llama3", 8.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0)
YARN = RopeScaling("yarn", 4.0, 32_768)

# field -> (the scaling that reads it, another value)
CHANGES = {
    "rope_type": (YARN, "linear"),
    "factor": (YARN, 2.0),
    "original_max_position_embeddings": (YARN, 1024),
    "low_freq_factor": (LLAMA3, 2.0),
    "high_freq_factor": (LLAMA3, 32.0),
    "beta_slow": (YARN, 8.0),
    "beta_fast": (YARN, 100.0),
    "attention_factor": (YARN, 1.5),
}


def angles(scaling, position=1):
    cos, sin = rope_angles(jnp.array([[position]]), HEAD_DIM, THETA, scaling)
    return np.concatenate([cos, sin], axis=-1)[0, 0]


def test_every_field_changes_the_angles():
    assert CHANGES.keys() == {field.name for field in dataclasses.fields(RopeScaling)}
    for field, (scaling, value) in CHANGES.items():
        changed = dataclasses.replace(scaling, **{field: value})
        assert np.abs(angles(changed, 900) - angles(scaling, 900)).max() > 1e-3, field


def test_interpolation_turns_at_a_position_as_before_at_its_share():
    np.testing.assert_allclose(angles(RopeScaling("linear", 4.0), 400), angles(None, 100), atol=1e-4)


@pytest.mark.parametrize(("scaling", "lower", "upper"), [(LLAMA3, 1, 4), (YARN, 1, 32)], ids=["llama3", "yarn"])
def test_fast_pairs_stay_slow_pairs_are_stretched_and_between_it_falls(scaling, lower, upper):
    """Bounds in turns within the original context, those of YaRN rounded to whole pairs."""
    kept = np.asarray(scaling.stretch(jnp.asarray(PLAIN, jnp.float32), THETA)) / PLAIN
    turns = scaling.original_max_position_embeddings * PLAIN / (2 * math.pi)
    np.testing.assert_allclose(kept[turns > upper * 1.6], 1, rtol=1e-6)
    np.testing.assert_allclose(kept[turns < lower / 1.6], 1 / scaling.factor, rtol=1e-6)
    assert (np.diff(kept) <= 1e-7).all() and ((kept > 0.3) & (kept < 0.9)).any()


def test_llama_3_between_its_bounds_is_linear_in_the_turns():
    turns = 8192 * PLAIN / (2 * math.pi)
    [pair] = np.flatnonzero((turns > 1.2) & (turns < 3.8))[:1]
    share = (turns[pair] - 1) / 3
    stretched = LLAMA3.stretch(jnp.asarray(PLAIN, jnp.float32), THETA)[pair]
    assert float(stretched) == pytest.approx(PLAIN[pair] * (share + (1 - share) / 8), rel=1e-5)


def test_yarn_makes_queries_and_keys_longer_and_the_others_do_not():
    assert YARN.magnitude == pytest.approx(0.1 * math.log(4) + 1)
    assert dataclasses.replace(YARN, attention_factor=1.25).magnitude == 1.25
    assert LLAMA3.magnitude == RopeScaling("linear", 2.0).magnitude == 1.0
    cos, sin = np.split(angles(YARN), 2)
    np.testing.assert_allclose(np.hypot(cos, sin), YARN.magnitude, rtol=1e-5)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rope_type": "dynamic"}, "model.rope_scaling.rope_type='dynamic' is unknown; choose linear, llama3 or yarn"),
        ({"factor": 0.5}, "model.rope_scaling.factor=0.5 must be at least 1"),
        ({"factor": math.inf}, "model.rope_scaling.factor=inf must be above 0 and finite"),
        ({"attention_factor": 0.0}, "model.rope_scaling.attention_factor=0.0 must be above 0"),
        ({"low_freq_factor": 4.0}, "low_freq_factor=4.0 must be below model.rope_scaling.high_freq_factor=4.0"),
        ({"beta_fast": 1.0}, "beta_slow=1.0 must be below model.rope_scaling.beta_fast=1.0"),
    ],
)
def test_values_that_cannot_be_are_one_clear_line(fields, message):
    with pytest.raises(UserError, match=message):
        RopeScaling(**fields)


def test_a_base_that_does_not_fall_cannot_be_stretched():
    with pytest.raises(UserError, match=r"model.rope_theta=1.0 must be above 1 where model.rope_scaling"):
        dataclasses.replace(TINY, rope_theta=1.0, rope_scaling=YARN)
