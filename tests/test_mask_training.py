"""Training an adapter of mask rows in two passes: the gradients of one pass over all rows, at less than half of its work."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.conftest import FULL
from tests.tiny_training import MODEL, SETTINGS, fresh_state, one_device_mesh, packed_batch
from tests.two_capacities import with_two_capacities
from wedlm_jax import mask_training, train_step
from wedlm_jax.diffusion.losses import loss_weights
from wedlm_jax.errors import UserError
from wedlm_jax.mask_training import mask_gradients
from wedlm_jax.metrics.curves import PANELS
from wedlm_jax.model.adapter import AdapterConfig, split_adapter
from wedlm_jax.model.kept_blocks import capacities
from wedlm_jax.model.mask_rows import Prediction
from wedlm_jax.model.parameters import init_params, transformer_from
from wedlm_jax.model.patterns import DualStream
from wedlm_jax.program_costs import matmul_flops
from wedlm_jax.sharding import MeshConfig, make_mesh
from wedlm_jax.train_state import abstract_state, from_params, from_seed
from wedlm_jax.train_step import corrupted_streams, wedlm_forward, wedlm_step

ADAPTER = AdapterConfig(rank=2, alpha=2.0)  # gentle: in a steep network rounding alone is past the tolerance
ADAPTED = dataclasses.replace(
    SETTINGS,
    model=dataclasses.replace(MODEL, adapter=ADAPTER, matmul_precision="highest"),
    objective=dataclasses.replace(SETTINGS.objective, ar_loss_weight=0),
)


# Programs of this file: those of others are for all capacities.
compile_step = functools.cache(train_step.compile_step.__wrapped__)


@pytest.fixture
def two_capacities(monkeypatch):
    """All calls of a program must be made with this, or all without."""
    with_two_capacities(monkeypatch)


def with_objective(**fields):
    return dataclasses.replace(ADAPTED, objective=dataclasses.replace(ADAPTED.objective, **fields))


@functools.cache
def parameters():
    """(base, adapter), in which no product with B is 0."""
    base, adapter = split_adapter(init_params(ADAPTED.model, 3))
    random = np.random.default_rng(2)
    return base, {
        name: x + jnp.asarray(0.1 * random.normal(size=x.shape), jnp.float32) for name, x in sorted(adapter.items())
    }


def batch_of(settings, batch):
    streams = jax.jit(corrupted_streams, static_argnums=2)(jnp.int32(1), batch, settings)
    return streams, loss_weights(streams, normalization="weights", ar=False)


J = ADAPTED.objective.block_size


@functools.partial(jax.jit, static_argnames=("model", "targets", "temperature"))
def in_two_passes(base, adapter, streams, weights, model=ADAPTED.model, targets="data", temperature=1.0):
    objective = dict(block_size=J, targets=targets, temperature=temperature)
    return mask_gradients(adapter, base, streams, weights, model=model, **objective)


@functools.partial(jax.jit, static_argnames=("targets", "temperature"))
def in_one_pass(base, adapter, streams, weights, targets="data", temperature=1.0):
    """Every row through the ordinary dual stream, and plain autodiff; distillation written out from whole logits."""

    def loss(adapter):
        if targets == "data":
            return wedlm_forward(base | adapter, (streams, weights), settings=ADAPTED)[0]
        L = streams.segment_ids.shape[1]
        transformer = transformer_from(ADAPTED.model, base | adapter)
        pattern = DualStream(streams.segment_ids, J)
        hidden = transformer.hidden(streams.tokens, positions=streams.positions, pattern=pattern, masked=streams.masked)
        log_p = jax.nn.log_softmax(transformer.logits(hidden) / temperature)
        # Row r of the memory stream speaks of the place behind its own, in its own document.
        position, segment = streams.positions[:, L:, None], streams.segment_ids[:, :, None]
        speaks = (streams.positions[:, None, :L] == position - 1) & (streams.segment_ids[:, None, :] == segment)
        log_q = jnp.einsum("Bpr,BrV->BpV", speaks.astype(jnp.float32), jax.lax.stop_gradient(log_p)[:, :L])
        divergence = jnp.sum(jnp.exp(log_q) * (log_q - log_p[:, L:]), axis=-1)
        return temperature**2 * jnp.sum(jnp.where(jnp.any(speaks, axis=-1), weights.mlm * divergence, 0.0))

    return jax.value_and_grad(loss)(adapter)


def assert_same(streams, weights, model=ADAPTED.model, **targets):
    gradients, value, _ = in_two_passes(*parameters(), streams, weights, model, **targets)
    expected_value, expected = in_one_pass(*parameters(), streams, weights, **targets)
    np.testing.assert_allclose(value, expected_value, rtol=1e-5, atol=1e-6)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        scale = float(np.abs(expected[name]).max())
        assert scale > 1e-5, name
        np.testing.assert_allclose(gradient, expected[name], atol=1e-5 * max(scale, 0.1), err_msg=name)


@pytest.mark.parametrize("objective", [{}, {"fully_masked": 1.0}, {"suffix_masked": 0.5, "fully_masked": 0.3}])
def test_gradients_are_those_of_every_row_in_one_pass(objective):
    assert_same(*batch_of(with_objective(**objective), packed_batch()))


@pytest.mark.parametrize("remat", ["none", "full"] if FULL else ["full"])
def test_layers_compiled_each_by_itself_have_the_same_gradients(remat, two_capacities):
    apart = dataclasses.replace(ADAPTED.model, scan_layers=False, remat=remat)
    assert_same(*batch_of(ADAPTED, packed_batch()), model=apart)


@pytest.mark.parametrize("temperature", [1.0, 2.0] if FULL else [2.0])
def test_the_base_teaches_what_it_says_one_place_before(temperature, two_capacities):
    assert_same(*batch_of(ADAPTED, packed_batch()), targets="distill", temperature=temperature)


def plain_text(batch):
    """Every token is learned, the first of a document too, of which the base says nothing."""
    return dataclasses.replace(batch, loss_mask=batch.segment_ids > 0)


@pytest.mark.parametrize("normalization", ["weights", "tokens"] if FULL else ["weights"])
def test_masks_that_no_teacher_speaks_of_count_in_no_mean(normalization, two_capacities):
    settings = with_objective(targets="distill", distill_temperature=2.0, fully_masked=1.0, normalization=normalization)
    batch = plain_text(packed_batch())
    _, metrics = compile_step(wedlm_step, settings, one_device_mesh())(fresh_state(ADAPTED), batch)
    streams = jax.jit(corrupted_streams, static_argnums=2)(jnp.int32(0), batch, settings)
    base, adapter = split_adapter(jax.device_get(fresh_state(ADAPTED).all_params))
    weights = loss_weights(streams, normalization="weights", ar=False)
    distil = dict(targets="distill", temperature=2.0)
    losses = in_two_passes(base, adapter, streams, weights, ADAPTED.model, **distil)[2]
    said = streams.masked[:, 24:] & (streams.positions[:, 24:] > 0)  # gamma is 1 in all blocks
    assert 0 < said.sum() < streams.masked.sum() and (losses[said] > 0).all() and not losses[~said].any()
    for name in ("loss", "distillation_loss", "distillation_loss_1.00"):
        np.testing.assert_allclose(metrics[name], losses[said].mean(), rtol=1e-4, err_msg=name)


def test_what_is_distilled_is_not_told_as_the_loss_of_the_data(two_capacities):
    names = {}
    state = abstract_state(ADAPTED.model, ADAPTED.optimizer, one_device_mesh())
    for targets in ("data", "distill"):
        step = functools.partial(wedlm_step, settings=with_objective(targets=targets))
        names[targets] = {name for name in jax.eval_shape(step, state, packed_batch())[1] if "_loss" in name}
    assert {name.replace("distillation", "mlm") for name in names["distill"]} == names["data"]
    assert not names["distill"] & names["data"]
    held_out = {f"validation_{name}" for name in names["data"]}  # a cross-entropy of the data, whatever is learned
    assert all(not (names["distill"] & set(panel) and held_out & set(panel)) for panel in PANELS.values())
    assert names["distill"] <= {name for panel in PANELS.values() for name in panel}


@pytest.mark.parametrize("learned", ["none", "few", "all"])
def test_any_number_of_masks_is_exact(learned):
    """None at all, fewer than the least capacity, and every token of a row without padding: none is cut off."""
    batch = packed_batch()
    L = batch.tokens.shape[1]
    if learned == "all":
        ones = np.ones_like(batch.tokens)
        positions = np.tile(np.arange(L, dtype=np.int32), (8, 1))
        documents = np.repeat(np.arange(8, dtype=np.int32)[:, None], L, axis=1)
        batch = dataclasses.replace(
            batch, loss_mask=ones.astype(bool), segment_ids=ones, positions=positions, document_ids=documents
        )
    else:
        few = (batch.loss_mask.cumsum(axis=1) <= 3) & batch.loss_mask
        batch = dataclasses.replace(batch, loss_mask=few if learned == "few" else np.zeros_like(batch.loss_mask))
    settings = with_objective(fully_masked=1.0)
    streams, weights = batch_of(settings, batch)
    most = int(streams.masked.sum(axis=1).max())
    assert {"none": most == 0, "few": 0 < most <= capacities(L)[-1], "all": most == L}[learned]
    if learned == "none":
        gradients, value, losses = jax.device_get(in_two_passes(*parameters(), streams, weights, ADAPTED.model))
        assert value == 0 and not losses.any() and not any(x.any() for x in gradients.values())
    else:
        assert_same(streams, weights)


def test_observed_rows_of_blocks_without_a_mask_take_no_place():
    """As those of a prompt, which carries no loss: no mask reads them."""
    batch = packed_batch()
    streams, _ = batch_of(ADAPTED, dataclasses.replace(batch, loss_mask=batch.loss_mask & (batch.tokens % 5 == 0)))
    tokens, positions, masked = (x[:, 24:] for x in (streams.tokens, streams.positions, streams.masked))
    holds = np.array(masked).reshape(8, -1, J).any(axis=2).repeat(J, axis=1)
    assert 0.1 < holds.mean() < 0.9
    observed = Prediction(tokens, positions, streams.segment_ids, masked, J).observed
    np.testing.assert_array_equal(observed, holds & ~masked & (streams.segment_ids > 0))


def test_the_step_leaves_the_base_alone_and_learns(two_capacities):
    base, adapter = (dict(part) for part in parameters())
    state = from_params(jax.tree.map(jnp.array, base), ADAPTED.model, ADAPTED.optimizer, one_device_mesh(), seed=1)
    assert state.frozen.keys() == base.keys() and state.params.keys() == adapter.keys()
    assert jax.tree.leaves(state.opt_state[0].mu).__len__() == len(adapter)
    step, losses = compile_step(wedlm_step, ADAPTED, one_device_mesh()), []
    for _ in range(12):
        state, metrics = step(state, packed_batch())
        losses.append(float(metrics["mlm_loss"]))
    assert np.mean(losses[-3:]) < np.mean(losses[:3])
    for name, value in base.items():
        np.testing.assert_array_equal(state.frozen[name], value)
    assert "ar_loss" not in metrics and metrics["useful_flops"] > 0


def test_one_and_eight_devices_agree(two_capacities):
    if jax.device_count() < 8:
        pytest.skip("needs eight devices (tests/conftest.py asks for them)")
    states = []
    for mesh in (one_device_mesh(), make_mesh(MeshConfig(2, 2, 2))):
        state = from_seed(ADAPTED.model, ADAPTED.optimizer, mesh, seed=0)
        for _ in range(2):
            state, metrics = compile_step(wedlm_step, ADAPTED, mesh)(state, packed_batch())
        states.append(jax.device_get((state.params, state.opt_state[0].mu, metrics)))
    (one, mu, metrics), (_, mu_8, metrics_8) = states
    np.testing.assert_allclose(metrics["loss"], metrics_8["loss"], rtol=1e-5)
    for name in one:
        np.testing.assert_allclose(mu[name], mu_8[name], atol=1e-5, err_msg=name)


def test_micro_batches_add_up(two_capacities):
    parts = dataclasses.replace(ADAPTED, micro_batches=4)
    outcomes = []
    for settings in (ADAPTED, parts):
        state, metrics = compile_step(wedlm_step, settings, one_device_mesh())(fresh_state(ADAPTED), packed_batch())
        outcomes.append((state.opt_state[0].mu, metrics))
    (whole, metrics), (added, metrics_of_parts) = outcomes
    np.testing.assert_allclose(metrics["loss"], metrics_of_parts["loss"], rtol=1e-5)
    for name in whole:
        np.testing.assert_allclose(whole[name], added[name], atol=1e-6)


def test_the_frozen_part_is_not_in_the_backward_pass(monkeypatch):
    """By products of the traced program, in forward passes of L rows: the base costs one for the memory and C / L for observed
    rows, C places for masks as many forward as backward, 2 C / L. Were the frozen rows differentiated, few would be 3."""
    sizes = dict(hidden_size=64, intermediate_size=1024, num_heads=2, num_kv_heads=1)
    model = dataclasses.replace(MODEL, **sizes, adapter=AdapterConfig(rank=1))
    streams, weights = batch_of(ADAPTED, packed_batch())
    base, adapter = split_adapter(jax.eval_shape(lambda: init_params(model, 0)))
    of_a_row = 2 * sum(x.size for name, x in base.items() if name.endswith("kernel"))
    L = streams.segment_ids.shape[1]

    def passes(places):
        monkeypatch.setattr(mask_training, "capacities", lambda length: (places,))
        gradients = lambda adapter, base: mask_gradients(adapter, base, streams, weights, model=model, block_size=J)[0]  # noqa: E731
        return matmul_flops(jax.make_jaxpr(gradients)(adapter, base).jaxpr) / (of_a_row * streams.segment_ids.size)

    few, all_places = passes(L // 4), passes(L)
    assert 1.75 < few < 2.1
    assert 2.25 < all_places - few < 2.75


@pytest.mark.skipif(not FULL, reason="compiles two deep models; launch/test.sh --full")
def test_nothing_of_the_frozen_part_is_kept_for_the_backward_pass(monkeypatch):
    """By temporaries of the compiled steps of one model and batch: full training keeps what 2L rows compute. Of an adapter's step
    they fall with the places for masks, to less than a quarter for L / 4; were the 2L frozen rows differentiated, they would be
    more than those of full training whatever C is."""
    sizes = dict(hidden_size=64, intermediate_size=256, num_layers=8, num_heads=2, num_kv_heads=1, head_dim=16)
    full = dataclasses.replace(SETTINGS, model=dataclasses.replace(MODEL, **sizes))
    gated = dataclasses.replace(ADAPTED, model=dataclasses.replace(full.model, adapter=AdapterConfig(rank=2)))
    batch, mesh = packed_batch(rows=2, length=128), one_device_mesh()
    monkeypatch.setattr(mask_training, "capacities", lambda length: (length // 4,))

    def temporaries(settings):
        state = abstract_state(settings.model, settings.optimizer, mesh)
        step = jax.jit(functools.partial(wedlm_step, settings=settings), donate_argnums=0)
        return step.lower(state, batch).compile().memory_analysis().temp_size_in_bytes

    assert temporaries(gated) < 0.25 * temporaries(full)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"ar_loss_weight": 1.0}, "objective.ar_loss_weight=1.0 has no meaning .* set it to 0"),
        ({"ar_steps": 3}, "objective.ar_steps=3"),
        ({"streams": "single"}, "objective.streams=single"),
        ({"reorder": False}, "objective.reorder=False"),
        ({"fully_masked": 0.7, "suffix_masked": 0.7}, "together they can be 1 at most"),
        ({"distill_temperature": 0.0}, "distill_temperature=0.0 must be above 0"),
        ({"distill_temperature": 2.0}, "distill_temperature=2.0 is read with objective.targets=distill alone"),
    ],
)
def test_what_has_no_gradient_is_refused(fields, message):
    with pytest.raises(UserError, match=message):
        with_objective(**fields)
    with pytest.raises(UserError, match="objective.targets=distill is for an adapter"):
        dataclasses.replace(SETTINGS, objective=dataclasses.replace(SETTINGS.objective, targets="distill"))
