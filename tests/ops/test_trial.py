"""The trial of kernels before "auto" takes them: right ones pass, wrong and failing ones are named, also inside a trace."""

import dataclasses
import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.conftest import FULL
from wedlm_jax.model.patterns import DualStream
from wedlm_jax.ops.attention import choice, flash_gpu, splash, splash_backward, splash_forward, trial
from wedlm_jax.ops.attention.dense import attend, is_exact
from wedlm_jax.ops.attention.flash_gpu import Kernels
from wedlm_jax.sharding import MeshConfig, make_mesh, on_mesh, replicated

HEADS = (4, 2, 64)  # N, K, H
TRYING = "attention: trying tokamax's flash kernels on this GPU first; model.attention=xla does without"


def forward(q, k, v, start, end):
    """What a flash kernel gives of one row, by dense attention."""
    out, lse = attend(*(x[None] for x in (q, k, v)), visible(k, start, end))
    return out[0], lse[0].T


def backward(q, k, v, start, end, lse, out, d_out):
    delta = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), axis=-1)
    row = (x[None] for x in (q, k, v))
    gradients = flash_gpu._dense_backward(*row, visible(k, start, end), lse.T[None], delta[None], d_out[None])
    return [gradient[0].astype(q.dtype) for gradient in gradients]


def visible(k, start, end):
    key = jnp.arange(k.shape[0])
    return ((start[:, None] <= key) & (key < end[:, None]))[None]


RIGHT = Kernels(forward, backward)


def a_key_too_many(q, k, v, start, end):
    return forward(q, k, v, start, jnp.minimum(end + 1, k.shape[0]))


def one_document(q, k, v, start, end):
    return forward(q, k, v, 0 * start, end)


def without_the_merged_output(q, k, v, start, end, lse, out, d_out):
    return backward(q, k, v, start, end, lse, forward(q, k, v, start, end)[0], d_out)


def nothing_of_the_keys(*args):
    d_q, d_k, d_v = backward(*args)
    return d_q, 0 * d_k, d_v


def not_a_number(*args):
    return [x.at[(0,) * x.ndim].set(jnp.nan) for x in forward(*args)]


def too_old(*args):
    raise NotImplementedError("compute capability 7.5\nand more lines")


@pytest.fixture
def a_gpu(monkeypatch):
    """This machine taken for one with a GPU, or a TPU where that is asked about; gives what sets the GPU's kernels."""
    for cached in (trial.failure, choice.log_once):
        cached.cache_clear()
    monkeypatch.setitem(choice.PLATFORMS, "tokamax", ("cpu",))
    monkeypatch.setattr(flash_gpu, "unsupported", lambda *_: None)
    yield lambda kernels: monkeypatch.setattr(flash_gpu, "_kernels_of_this_gpu", lambda dtype: kernels)
    trial.failure.cache_clear()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_right_kernels_pass_the_trial(a_gpu, dtype):
    a_gpu(RIGHT)
    assert trial.failure("flash", *HEADS, jnp.dtype(dtype)) is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"forward": a_key_too_many},
        {"forward": one_document},
        {"forward": not_a_number},
        {"backward": without_the_merged_output},
        {"backward": nothing_of_the_keys},
    ],
    ids=lambda wrong: next(iter(wrong.values())).__name__,
)
def test_wrong_kernels_fail_the_trial(a_gpu, wrong):
    a_gpu(dataclasses.replace(RIGHT, **wrong))
    assert trial.failure("flash", *HEADS, jnp.dtype(jnp.bfloat16)).startswith("it is wrong on this GPU, by ")


SPLIT, WINDOW = ("split", "attend_split", "GPU"), ("window", "attend_window", "TPU")


@pytest.mark.parametrize(
    ("kernels", "attend_few", "device", "dtype"),
    [
        (*SPLIT, jnp.float32),
        (*WINDOW, jnp.bfloat16),
        *([(*SPLIT, jnp.bfloat16), (*WINDOW, jnp.float32)] if FULL else []),
    ],
)
def test_the_kernels_over_a_cache_are_tried_as_well_while_a_decoding_program_is_traced(
    a_gpu, monkeypatch, kernels, attend_few, device, dtype
):
    def tried():
        found = []
        jax.eval_shape(lambda x: found.append(trial.failure(kernels, *heads)) or x, jnp.zeros(1))
        return found[0]

    monkeypatch.setitem(choice.PLATFORMS, "splash", ("cpu",))
    heads = (4, 2, 128, jnp.dtype(dtype))
    interpreted = functools.partial(getattr(trial, attend_few), interpret=True)
    monkeypatch.setattr(trial, attend_few, interpreted)
    assert tried() is None
    trial.failure.cache_clear()
    monkeypatch.setattr(trial, attend_few, lambda q, k, v, layer, end: interpreted(q, k, v, layer, end + 1))
    assert tried().startswith(f"it is wrong on this {device}, by ")


@pytest.mark.parametrize(
    ("kernels", "dtype"),
    [("splash", jnp.float32), ("kept", jnp.bfloat16), *([("splash", jnp.bfloat16)] if FULL else [])],
)
def test_our_kernels_for_splash_are_tried_as_well(a_gpu, monkeypatch, kernels, dtype):
    monkeypatch.setitem(choice.PLATFORMS, "splash", ("cpu",))
    monkeypatch.setattr(trial, "splash_attention", functools.partial(splash.splash_attention, interpret=True))
    heads = (4, 2, 64, jnp.dtype(dtype))
    assert trial.failure(kernels, *heads) is None
    trial.failure.cache_clear()
    right = splash_backward.splash_gradients
    monkeypatch.setattr(
        splash_backward, "splash_gradients", lambda *args, **settings: (right(*args, **settings)[0],) * 3
    )
    assert trial.failure(kernels, *heads).startswith("it failed on this TPU: ")
    trial.failure.cache_clear()
    monkeypatch.setattr(
        splash_backward, "splash_gradients", lambda q, k, v, d_out, lse, delta, *args, **settings: right(
            q, k, v, d_out, lse, 0 * delta, *args, **settings
        )
    )  # fmt: skip
    assert trial.failure(kernels, *heads).startswith("it is wrong on this TPU, by ")
    monkeypatch.setattr(splash_backward, "splash_gradients", right)
    assert_found(monkeypatch, kernels, heads, lambda out, lse: (jnp.roll(out, 1, axis=1), lse))
    assert_found(monkeypatch, kernels, heads, lambda out, lse: (out, lse + 0.1))  # by its gradients


def assert_found(monkeypatch, kernels, heads, mistake):
    """A forward kernel that makes it is not taken."""
    right = splash_forward.splash_output
    trial.failure.cache_clear()
    with monkeypatch.context() as wrong:
        wrong.setattr(splash_forward, "splash_output", lambda *args, **settings: mistake(*right(*args, **settings)))
        assert trial.failure(kernels, *heads).startswith("it is wrong on this TPU, by ")


@pytest.mark.parametrize("exact", [False, True])
def test_kernels_are_tried_at_the_precision_of_the_program_that_asks(a_gpu, exact):
    found = []

    def forward_at_some_precision(q, *arrays):
        found.append(is_exact(q.dtype))
        return forward(q, *arrays)

    a_gpu(dataclasses.replace(RIGHT, forward=forward_at_some_precision))
    assert trial.failure("flash", *HEADS, jnp.dtype(jnp.float32), exact) is None
    assert set(found) == {exact}


def test_kernels_that_fail_do_not_end_the_run(a_gpu):
    a_gpu(dataclasses.replace(RIGHT, backward=too_old))
    reason = trial.failure("flash", *HEADS, jnp.dtype(jnp.float32))
    assert reason == "it failed on this GPU: NotImplementedError: compute capability 7.5"


@pytest.mark.parametrize(
    ("kernels", "device"), [("flash", "GPU"), ("split", "GPU"), ("window", "TPU"), ("splash", "TPU"), ("kept", "TPU")]
)
def test_where_no_such_device_is_they_are_not_tried(kernels, device):
    trial.failure.cache_clear()
    assert trial.failure(kernels, *HEADS, jnp.dtype(jnp.float32)) == f"no {device} is here to try it on"


@pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices (tests/conftest.py asks for eight)")
@pytest.mark.parametrize(
    ("kernels", "logged"),
    [
        (RIGHT, "attention: tokamax, on cpu"),
        (
            dataclasses.replace(RIGHT, forward=too_old),
            "attention: xla, on cpu, because of tokamax: it failed on this GPU: "
            "NotImplementedError: compute capability 7.5",
        ),
    ],
    ids=["right", "failing"],
)
def test_a_step_on_a_mesh_tries_them_once_while_it_is_traced_and_takes_them_only_if_they_are_right(
    a_gpu, caplog, kernels, logged
):
    """Of a device's own heads, as those are what it computes."""
    a_gpu(kernels)
    length, mesh = 128, make_mesh(MeshConfig(data=2, tensor=2), jax.devices()[:4])
    random = np.random.default_rng(0)
    qkv = [np.float32(random.normal(size=(2, 2 * length, heads, 64))) for heads in (4, 2, 2)]
    qkv, segment_ids = jax.device_put((qkv, np.ones((2, length), int)), replicated(mesh))

    def loss(qkv, implementation):
        with on_mesh(mesh):
            attention = jax.checkpoint(lambda *qkv: DualStream(segment_ids, 32)(*qkv, implementation))
            return jnp.sum(jnp.sin(attention(*qkv)))

    step = jax.jit(jax.value_and_grad(loss), static_argnums=1)
    expected = step(qkv, "xla")
    choice.log_once.cache_clear()
    with caplog.at_level(logging.INFO, "wedlm_jax"):
        found = step(qkv, "auto")
        jax.jit(loss, static_argnums=1)(qkv, "auto")
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-4), found, expected)
    assert [record.getMessage() for record in caplog.records] == [TRYING, logged]
    assert trial.failure.cache_info().misses == 1
