"""A model with kernels of int8 computes what the same kernels in float32 compute, and is for decoding alone."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.model.tiny import TINY, logits_of, params, tiny_model
from wedlm_jax.errors import UserError
from wedlm_jax.hf.adapter import write_adapter
from wedlm_jax.hf.export import save_hf
from wedlm_jax.model.adapter import AdapterConfig
from wedlm_jax.model.int8 import in_int8, on_host, rounded
from wedlm_jax.model.layers import join, products_of
from wedlm_jax.model.parameters import transformer_from
from wedlm_jax.model.patterns import Causal
from wedlm_jax.objective import ObjectiveConfig
from wedlm_jax.optimizer import OptimizerConfig
from wedlm_jax.train_step import StepSettings

TOKENS, POSITIONS = np.random.default_rng(0).integers(0, 40, (2, 8)), np.tile(np.arange(8), (2, 1))


def in_float32(int8: dict) -> dict:
    """The same values, each kernel multiplied out."""
    found = {name: x for name, x in int8.items() if not name.endswith("kernel_scale")}
    for name, x in int8.items():
        if name.endswith("kernel_scale"):
            kernel = found[name.removesuffix("_scale")]
            inputs = range(1, 1 + kernel.ndim - x.ndim)
            found[name.removesuffix("_scale")] = kernel.astype(jnp.float32) * jnp.expand_dims(x, tuple(inputs))
    return found


@pytest.mark.parametrize("changes", [{}, {"qkv_bias": True}, {"tie_word_embeddings": True}], ids=str)
def test_the_logits_are_those_of_the_rounded_kernels_in_float32(changes):
    config = dataclasses.replace(TINY, **changes)
    int8_config, int8 = rounded(config, params(config))
    ours = logits_of(int8_config, int8, TOKENS, POSITIONS, Causal())
    np.testing.assert_allclose(ours, logits_of(config, in_float32(int8), TOKENS, POSITIONS, Causal()), atol=2e-4)


def test_kernels_of_the_layers_are_rounded_and_nothing_else():
    config = dataclasses.replace(TINY, adapter=AdapterConfig())
    before, (int8_config, after) = params(config), rounded(config, params(config))
    kernels = {name for name in before if name.startswith("layers.") and name.endswith(".kernel")}
    assert len(kernels) == 7 and {name for name, x in after.items() if x.dtype == jnp.int8} == kernels
    assert after.keys() - before.keys() == {f"{name}_scale" for name in kernels}
    assert all(after[name] is x for name, x in before.items() if name not in kernels)
    transformer_from(int8_config, after)
    for name, x in in_float32(after).items():
        np.testing.assert_allclose(x, before[name], atol=1e-2 * float(jnp.abs(before[name]).max()))


def test_kernels_that_lie_otherwise_for_decoding_give_the_same_products():
    transformer = in_int8(tiny_model()).transformer
    graph, stacked = transformer.split_stack()
    layers = [jax.tree.map(lambda x: x[0], stacked) for _ in range(2)]
    plain, joined = (nnx.merge(graph, layer).mlp for layer in layers)
    tokens = jnp.asarray(np.random.default_rng(0).normal(size=(5, TINY.hidden_size)), jnp.float32)
    expected = [linear.product(tokens) for linear in (plain.gate_proj, plain.up_proj)]
    join([joined.gate_proj, joined.up_proj])
    for ours, theirs in zip(products_of([joined.gate_proj, joined.up_proj], tokens), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
    queries = nnx.merge(graph, jax.tree.map(lambda x: x[0], stacked)).attention.q_proj
    expected.append(queries.product(tokens))
    queries.put_heads_first()
    assert queries.kernel.shape == (TINY.num_heads, TINY.hidden_size, TINY.head_dim)
    np.testing.assert_allclose(queries.product(tokens), expected[2], rtol=1e-5, atol=1e-5)
    plain.up_proj.turn()
    assert plain.up_proj.kernel[...].dtype == jnp.int8
    np.testing.assert_allclose(plain.up_proj.product(tokens), expected[1], rtol=1e-5, atol=1e-5)


def test_a_rounded_model_is_not_saved_and_not_trained(tmp_path):
    adapted = in_int8(tiny_model(adapter=AdapterConfig(rows="all")))
    for save in (save_hf, lambda model, path: write_adapter(model, path, None)):
        with pytest.raises(UserError, match="rounded to int8 for decoding; load it without dtype=int8"):
            save(adapted, tmp_path / "out")
    assert not [*tmp_path.iterdir()]
    with pytest.raises(UserError, match="model.kernel_dtype=int8 is for decoding alone; leave it out"):
        StepSettings(adapted.config, ObjectiveConfig(), OptimizerConfig(), 39, 10, 0)


def test_a_jax_without_the_host_is_told_how_to_add_it(monkeypatch):
    def none(backend):
        raise RuntimeError(f"Unknown backend {backend}")

    monkeypatch.setattr(jax, "local_devices", none)
    with pytest.raises(UserError, match="JAX_PLATFORMS leaves out; add it: JAX_PLATFORMS=cuda,cpu"), on_host():
        pass
