"""Which implementation of attention a pattern takes, and that they agree."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from wedlm_jax.errors import UserError
from wedlm_jax.model import patterns
from wedlm_jax.model.patterns import Causal, DualStream
from wedlm_jax.ops.attention import choice, trial
from wedlm_jax.ops.attention.choice import choose


@pytest.mark.parametrize(
    ("asked", "unsupported", "platform", "chosen"),
    [
        ("auto", None, "tpu", "splash"),
        ("auto", "rows of 8", "tpu", "xla"),
        ("auto", None, "cpu", "xla"),
        ("auto", None, "gpu", "tokamax"),
        ("auto", None, "cuda", "tokamax"),
        ("xla", None, "tpu", "xla"),
        ("splash", None, "cpu", "splash"),
        ("tokamax", None, "gpu", "tokamax"),
    ],
)
def test_auto_is_the_kernel_of_the_platform_for_shapes_that_it_can_do_and_xla_elsewhere(
    asked, unsupported, platform, chosen
):
    assert choose(asked, {"splash": unsupported, "tokamax": None}, platform) == chosen


def test_auto_takes_no_kernels_that_cannot_do_it_or_fail_on_the_device_that_is_here():
    kernels = {"splash": None, "tokamax": None}
    untried = {"tokamax": pytest.fail}
    assert choose("auto", kernels | {"tokamax": "rows of 8"}, "gpu", failures=untried) == "xla"  # tried for nothing
    assert choose("auto", kernels, "gpu", failures={"tokamax": lambda: "wrong"}) == "xla"
    assert choose("auto", kernels, "tpu", failures=untried) == "splash"
    assert choose("auto", kernels, "tpu", failures=untried | {"splash": lambda: "wrong"}) == "xla"
    assert choose("tokamax", kernels, "gpu", failures=untried) == "tokamax"  # as asked


def test_what_is_asked_for_is_never_replaced_in_silence():
    with pytest.raises(UserError, match="model.attention=splash cannot do this: rows of 8; choose auto or xla"):
        choose("splash", {"splash": "rows of 8"}, "tpu")
    with pytest.raises(
        UserError, match="model.attention=tokamax cannot do this: tokamax is not installed; choose auto"
    ):
        choose("tokamax", {"tokamax": "tokamax is not installed"}, "gpu")
    with pytest.raises(UserError, match="model.attention=tokamax is for GPUs, and this is cpu; choose auto or xla"):
        choose("tokamax", {}, "cpu")


def test_a_choice_is_logged_once_with_its_reason_and_a_kernel_that_is_not_taken_is_warned_of(caplog):
    """Warnings alone are shown where nobody has set up logging, as in every command."""
    choice.log_once.cache_clear()
    with caplog.at_level(logging.INFO, "wedlm_jax"):
        for _ in range(2):
            choose("auto", {"splash": "rows of 8"}, "tpu")
            choose("auto", {"splash": None}, "tpu")
            choose("auto", {}, "cpu")
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", "attention: xla, on tpu, because of splash: rows of 8"),
        ("INFO", "attention: splash, on tpu"),
        ("INFO", "attention: xla, on cpu"),
    ]


def test_splash_runs_by_our_kernels_unless_their_trial_or_the_length_of_a_row_speaks_against_it(monkeypatch, caplog):
    choice.log_once.cache_clear()
    q, k, long = (jax.ShapeDtypeStruct((1, n, 2, 128), jnp.bfloat16) for n in (256, 256, 2**16))
    with caplog.at_level(logging.INFO, "wedlm_jax"):
        assert patterns._own_kernels(q, k)  # no TPU is here to try it on
        monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
        monkeypatch.setattr(trial, "failure", lambda *_: None)
        assert patterns._own_kernels(q, k)
        assert not patterns._own_kernels(long, long)
        monkeypatch.setattr(trial, "failure", lambda kernels, *_: f"{kernels} are wrong")
        assert not patterns._own_kernels(q, k)
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", f"attention: splash by jax's kernels, because of ours: {reason}")
        for reason in ("65536 keys of 128 are too many for a chip's memory", "splash are wrong")
    ]


def test_kernels_are_tried_for_the_heads_and_the_numbers_of_the_program_that_asks(monkeypatch):
    asked = []
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    monkeypatch.setattr(trial, "failure", lambda *arguments: asked.append(arguments))
    q, k = (jax.ShapeDtypeStruct((1, 256, n, 128), jnp.float32) for n in (4, 2))
    for precision in ("default", "highest"):
        with jax.default_matmul_precision(precision):
            assert patterns._own_kernels(q, k)
    assert asked == [("splash", 4, 2, 128, jnp.float32, exact) for exact in (False, True)]


def test_the_platform_is_that_of_this_process_outside_a_mesh():
    assert choice.target_platform() == jax.default_backend() == "cpu"


L, BLOCK_SIZE = 128, 32
SEGMENT_IDS = jnp.asarray(np.repeat([[1, 2, 2, 0]], L // 4, axis=1))


@pytest.mark.parametrize(
    ("pattern", "tokens"),
    [
        (Causal(), L),
        (Causal(SEGMENT_IDS), L),
        (DualStream(SEGMENT_IDS, BLOCK_SIZE), 2 * L),
        (DualStream(SEGMENT_IDS, BLOCK_SIZE, "bidirectional"), 2 * L),
    ],
    ids=["causal", "packed", "dual", "dual, bidirectional"],
)
def test_splash_and_key_ranges_agree(pattern, tokens):
    random = np.random.default_rng(0)
    q, k, v = (jnp.asarray(random.normal(size=(1, tokens, heads, 64)), jnp.float32) for heads in (2, 1, 1))
    by_splash, by_ranges = (jax.jit(lambda: pattern(q, k, v, name))() for name in ("splash", "xla"))  # noqa: B023
    real = slice(None) if pattern.segment_ids is None else np.tile(SEGMENT_IDS[0] > 0, tokens // L)
    np.testing.assert_allclose(by_splash[:, real], by_ranges[:, real], atol=5e-6)
