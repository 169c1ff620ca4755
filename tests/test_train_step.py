"""The update: what it learns from, what it leaves alone, and that its parts may be cut anyhow."""

import dataclasses
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.conftest import FULL
from tests.quick_jit import quick_jit
from tests.tiny_training import EXPERIMENT, MODEL, SETTINGS, fresh_state, one_device_mesh, packed_batch, rows_of
from wedlm_jax import train as train_module
from wedlm_jax import train_step
from wedlm_jax.diffusion.losses import loss_weights
from wedlm_jax.errors import UserError
from wedlm_jax.model.adapter import AdapterConfig
from wedlm_jax.model.transformer import Transformer
from wedlm_jax.model_file import ModelFile
from wedlm_jax.objective import ObjectiveConfig
from wedlm_jax.ops.attention import ranges
from wedlm_jax.program_costs import matmul_flops
from wedlm_jax.step_metrics import LOSS_BY_RATIO, masked_by_ratio, sums_by_ratio
from wedlm_jax.train_state import new_state
from wedlm_jax.train_step import (
    StepSettings,
    ar_step,
    compile_step,
    corrupted_streams,
    wedlm_forward,
    wedlm_step,
)


def run(step, batch, *, settings: StepSettings = SETTINGS, state=None, updates: int = 2, compiled=compile_step):
    """Two updates, because the very first has learning rate 0."""
    state = fresh_state() if state is None else jax.tree.map(jnp.array, state)
    for _ in range(updates):
        state, metrics = compiled(step, settings, one_device_mesh())(state, batch)
    return state, metrics


def with_objective(**fields) -> StepSettings:
    return dataclasses.replace(SETTINGS, objective=dataclasses.replace(SETTINGS.objective, **fields))


def assert_same_update(a, b, atol):
    """The gradients, of which Adam's first moment is made, and what became of the parameters."""
    for name in a.params:
        np.testing.assert_allclose(a.opt_state[0].mu[name], b.opt_state[0].mu[name], atol=atol, err_msg=name)
        np.testing.assert_allclose(a.params[name], b.params[name], atol=100 * atol, err_msg=name)


@pytest.mark.parametrize("step", [wedlm_step, ar_step])
def test_training_on_one_batch_lowers_its_loss(step):
    _, first = run(step, packed_batch(), updates=1)
    _, last = run(step, packed_batch(), updates=15)
    assert last["ar_loss"] < 0.7 * first["ar_loss"]
    assert step is ar_step or last["mlm_loss"] < 0.85 * first["mlm_loss"]


@pytest.mark.parametrize(("step", "micro_batches"), [(wedlm_step, 8), (ar_step, 2)])
def test_accumulation_gives_the_same_update(step, micro_batches):
    """Both losses are normalised over the whole batch, though its parts hold unequal numbers of tokens."""
    whole, metrics = run(step, packed_batch())
    settings = dataclasses.replace(SETTINGS, micro_batches=micro_batches)
    parts, metrics_of_parts = run(step, packed_batch(), settings=settings)
    for name in metrics:
        np.testing.assert_allclose(metrics[name], metrics_of_parts[name], rtol=1e-5, err_msg=name)
    assert_same_update(whole, parts, atol=1e-6)


def test_packing_order_gives_the_same_update():
    batch = packed_batch()
    whole, _ = run(wedlm_step, batch)
    permuted, _ = run(wedlm_step, rows_of(batch, np.random.default_rng(0).permutation(8)))
    assert_same_update(whole, permuted, atol=1e-6)


@pytest.mark.parametrize("step", [wedlm_step, ar_step])
def test_packed_documents_do_not_see_each_other(step):
    """Where document 1 has labels and document 2 has none, the update does not depend on the text of document 2."""
    batch = packed_batch()
    one = dataclasses.replace(batch, loss_mask=batch.loss_mask & (batch.segment_ids == 1))
    other = dataclasses.replace(one, tokens=np.where(batch.segment_ids == 2, 5, batch.tokens))
    assert_same_update(run(step, one)[0], run(step, other)[0], atol=0)


def test_masks_depend_on_the_seed_and_the_step_and_are_fed_as_the_mask_token():
    draw = jax.jit(corrupted_streams, static_argnums=2)

    def streams(step=0, **fields):
        return draw(jnp.int32(step), packed_batch(), dataclasses.replace(SETTINGS, **fields))

    first = streams()
    np.testing.assert_array_equal(first.masked, streams().masked)
    for one, other in itertools.combinations((first, streams(step=1), streams(seed=1)), 2):
        assert not np.array_equal(one.masked, other.masked)
    assert (first.tokens[first.masked] == SETTINGS.mask_token_id).all() and first.masked.any()
    assert (streams(mask_token_id=2).tokens[first.masked] == 2).all()


# Every field of ObjectiveConfig; some say what is fed and when, and those of distillation are for adapters (test_mask_training).
OBJECTIVE = {
    "block_size": 2, "in_block": "bidirectional", "streams": "single", "normalization": "tokens", "ar_loss_weight": 0,
    "mask_token_id": 310, "ar_steps": 2, "reorder": False,
    "fully_masked": 1.0, "suffix_masked": 1.0, "targets": "distill", "distill_temperature": 2.0,
}  # fmt: skip
NOT_OF_THE_LOSS = ("mask_token_id", "ar_steps")
OF_DISTILLATION = ("targets", "distill_temperature")


@functools.cache
def loss_with(field: str | None) -> float:
    """Of one batch, with this field of the objective changed; None: with none."""
    settings = with_objective(**({} if field is None else {field: OBJECTIVE[field]}))
    streams = jax.jit(corrupted_streams, static_argnums=2)(jnp.int32(0), packed_batch(), settings)
    weights = loss_weights(streams, normalization=settings.objective.normalization)
    forward = jax.jit(functools.partial(wedlm_forward, settings=settings))
    loss, parts = forward(fresh_state().params, (streams, weights))
    w = settings.objective.ar_loss_weight
    np.testing.assert_allclose(loss, (parts["mlm_loss"] + w * parts["ar_loss"]) / (1 + w), rtol=1e-6)
    return float(loss)


@pytest.mark.parametrize("field", [field for field in OBJECTIVE if field not in NOT_OF_THE_LOSS + OF_DISTILLATION])
def test_every_field_of_the_objective_reaches_the_loss(field):
    assert abs(loss_with(field) - loss_with(None)) > 1e-4


def test_matmul_precision_holds_in_the_custom_gradients_of_attention(monkeypatch):
    """Which are traced when the model's forward pass, which sets it, is over."""
    monkeypatch.setattr(ranges, "DENSE_SCORES", 0)
    settings = dataclasses.replace(SETTINGS, model=dataclasses.replace(MODEL, matmul_precision="highest"))
    text = compile_step(wedlm_step, settings, one_device_mesh()).lower(fresh_state(), packed_batch()).as_text()
    batched = [line for line in text.splitlines() if "dot_general" in line and "batching_dims" in line]  # of heads
    scores = [
        line for line in batched if min(shape.count("x") for shape in re.findall(r"tensor<([^>]*)>", line)[:2]) > 3
    ]
    assert len(scores) >= 7  # two forward, five backward
    found = [re.search(r"precision = \[(\w+), \w+\]", line) for line in scores]
    assert {match[1] if match else "DEFAULT" for match in found} == {"HIGHEST"}


def test_shares_of_blocks_are_refused_where_whole_documents_are_masked():
    for name in ("fully_masked", "suffix_masked"):
        with pytest.raises(UserError, match=rf"objective.{name}=0.5 .*objective.streams=single masks whole documents"):
            ObjectiveConfig(streams="single", **{name: 0.5})


def test_the_mask_id_of_the_objective_is_that_of_the_model_and_its_ar_steps_come_first(tmp_path, monkeypatch):
    steps: list[str] = []

    def compile_step(step, settings, mesh):
        def count(state, batch):
            steps.append(step.__name__)
            numbers = {"loss": 1.0, "tokens": 1, "useful_flops": 1.0, "skipped_in_row": 0}
            return dataclasses.replace(state, step=state.step + 1), jax.tree.map(jnp.asarray, numbers)

        return count

    monkeypatch.setattr(train_module, "compile_step", compile_step)
    monkeypatch.setattr(train_module, "make_mesh", lambda config: one_device_mesh())
    masks = []
    for name, changes in (("plain", {}), ("changed", {name: OBJECTIVE[name] for name in NOT_OF_THE_LOSS})):
        objective = dataclasses.replace(EXPERIMENT.objective, **changes)
        train_module.train(dataclasses.replace(EXPERIMENT, objective=objective), tmp_path / name)
        masks.append(ModelFile.read(tmp_path / name).mask_token_id)
    assert steps == ["wedlm_step"] * 6 + ["ar_step"] * 2 + ["wedlm_step"] * 4
    assert masks[0] != masks[1] == 310


def test_rows_of_weight_0_never_meet_the_output_layer(monkeypatch):
    seen = []

    def spy(self, hidden, targets, carries_loss):
        seen.append(np.asarray(carries_loss))
        return jnp.zeros(targets.shape)

    monkeypatch.setattr(Transformer, "hidden", lambda self, tokens, **_: jnp.zeros((*tokens.shape, MODEL.hidden_size)))
    monkeypatch.setattr(Transformer, "token_losses", spy)
    streams = jax.jit(corrupted_streams, static_argnums=2)(jnp.int32(0), packed_batch(), SETTINGS)
    weights = loss_weights(streams, normalization="weights")
    for ar in (weights.ar, jnp.zeros_like(weights.ar)):
        wedlm_forward(fresh_state().params, (streams, weights._replace(ar=ar)), settings=SETTINGS)
    both = np.array(streams.masked)
    both[:, :24] = streams.labelled
    np.testing.assert_array_equal(seen, [both, streams.masked])


@pytest.mark.parametrize("w", [0, 0.5])
def test_an_ar_loss_that_does_not_count_is_not_told(w):
    step = functools.partial(wedlm_step, settings=with_objective(ar_loss_weight=w))
    _, metrics = jax.eval_shape(step, fresh_state(), packed_batch())
    assert ("ar_loss" in metrics) == bool(w)


def test_a_loss_that_is_not_finite_leaves_parameters_and_optimizer_alone_and_is_counted():
    state = fresh_state()
    broken = dataclasses.replace(state, params=state.params | {"final_norm.scale": jnp.full(16, jnp.nan)})
    after, metrics = run(wedlm_step, packed_batch(), state=broken)
    assert (metrics["skipped"], metrics["skipped_in_row"], after.step) == (2, 2, 2)
    for name, value in broken.params.items():
        np.testing.assert_array_equal(after.params[name], value)
    for moment, zero in zip(jax.tree.leaves(after.opt_state), jax.tree.leaves(state.opt_state), strict=True):
        np.testing.assert_array_equal(moment, zero)

    mended = dataclasses.replace(after, params=state.params)
    _, metrics = run(wedlm_step, packed_batch(), state=mended, updates=1)
    assert (metrics["skipped"], metrics["skipped_in_row"]) == (2, 0)


def test_a_gradient_that_is_not_finite_beside_a_loss_that_is_leaves_them_alone_too():
    state = new_state({"final_norm.scale": jnp.ones(4)}, SETTINGS.optimizer)
    state = dataclasses.replace(state, step=state.step + 1)  # the very first has learning rate 0
    update = quick_jit(functools.partial(train_step.update, settings=SETTINGS))
    for gradient, skipped in ((2.0, 0), (jnp.inf, 1)):
        gradients = {"final_norm.scale": jnp.ones(4).at[0].set(gradient)}
        after, metrics = update(state, gradients, {"loss": jnp.float32(1)})
        assert (metrics["skipped"], metrics["skipped_in_row"], after.step) == (skipped, skipped, 2)
        held, left = (jax.tree.leaves((of.params, of.opt_state)) for of in (state, after))
        assert [np.array_equal(*pair) for pair in zip(held, left, strict=True)] == [bool(skipped)] * len(held)


@pytest.mark.parametrize("step", [wedlm_step, ar_step])
def test_moments_are_overwritten_where_they_lie(step):
    """A copy of each would take as much memory again."""
    compiled = compile_step(step, SETTINGS, one_device_mesh()).lower(fresh_state(), packed_batch()).compile()
    moment = r"%\S*opt_state\S*_[mn]u_\S*"
    text = compiled.as_text()
    assert len(set(re.findall(moment, text))) >= 2 * len(fresh_state().params)
    assert not re.findall(rf" copy\({moment}\)", text)


def test_tokens_and_padding_are_counted():
    batch = packed_batch()
    _, metrics = run(ar_step, batch, updates=1)
    assert metrics["tokens"] == (batch.segment_ids > 0).sum()
    np.testing.assert_allclose(metrics["padding_share"], (batch.segment_ids == 0).mean(), rtol=1e-6)


@pytest.mark.parametrize("field", ["block_size", "ar_loss_weight", "ar_steps"])
def test_bad_fields_are_named(field):
    with pytest.raises(UserError, match=f"objective.{field}=-1"):
        ObjectiveConfig(**{field: -1})


def test_bfloat16_parameters_are_for_the_base_of_an_adapter_alone():
    half = dataclasses.replace(MODEL, param_dtype="bfloat16")
    with pytest.raises(UserError, match="model.param_dtype=bfloat16 is for the base of an adapter.*: leave it out"):
        dataclasses.replace(SETTINGS, model=half)
    beside = dataclasses.replace(SETTINGS, model=dataclasses.replace(half, adapter=AdapterConfig(rows="all")))
    assert beside.model.param_dtype == "bfloat16"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("field", ["ar_loss_weight", "fully_masked", "suffix_masked", "distill_temperature"])
def test_a_number_that_is_not_finite_is_named(field, value):
    with pytest.raises(UserError, match=f"objective.{field}={value} must be .* and finite"):
        ObjectiveConfig(**{field: value})


def test_the_mlm_loss_by_mask_ratio_parts_the_masked_tokens():
    """Each masked token is in one quarter; a quarter without any has no loss, which is told as NaN."""
    batch = packed_batch()
    streams = jax.jit(corrupted_streams, static_argnums=2)(jnp.int32(0), batch, SETTINGS)
    quarters = masked_by_ratio(streams)
    np.testing.assert_array_equal(sum(quarters.values()), streams.masked[:, 24:])
    for name, upper in zip(LOSS_BY_RATIO, (0.25, 0.5, 0.75, 1.0), strict=True):
        ratios = streams.mask_ratio[quarters[name]]
        assert ((upper - 0.25 < ratios) & (ratios <= upper)).all()
    _, metrics = run(wedlm_step, batch, updates=1)
    means = {name: float(metrics[name]) for name in LOSS_BY_RATIO}
    losses = np.linspace(0, 1, 8 * 48).reshape(8, 48)
    sums = sums_by_ratio(jnp.asarray(losses), streams)
    for name, masked in quarters.items():
        np.testing.assert_allclose(sums[name], losses[:, 24:][np.asarray(masked)].sum(), rtol=1e-5)
        assert np.isnan(means[name]) if not masked.any() else 0 < means[name] < 20


def test_a_step_without_masks_has_no_mlm_loss_and_is_no_bad_one():
    """One token to learn in all: in about half of the steps it is no mask."""
    batch = packed_batch()
    one = np.zeros_like(batch.loss_mask)
    one[0, 1] = True
    batch = dataclasses.replace(batch, loss_mask=one)
    state, masked = fresh_state(), set()
    draw = jax.jit(corrupted_streams, static_argnums=2)
    for _ in range(8):
        some = bool(draw(state.step, batch, SETTINGS).masked.any())
        state, metrics = compile_step(wedlm_step, SETTINGS, one_device_mesh())(state, batch)
        assert np.isfinite(metrics["mlm_loss"]) == some and np.isfinite(metrics["loss"]) and metrics["skipped"] == 0
        masked.add(some)
    assert masked == {True, False}


def prompt_batch(share):
    """Rows of 24 tokens of which this share, at the start of each document, is not learned."""
    batch = packed_batch()
    learned = batch.loss_mask & (batch.positions >= 12 * share)
    return dataclasses.replace(batch, loss_mask=learned)


SKIPPING = dataclasses.replace(SETTINGS, skip_unread=True)


only_full = pytest.mark.skipif(not FULL, reason="programs of the same kind: launch/test.sh --full")


@pytest.mark.parametrize(
    ("share", "blocks", "in_parts"),
    [
        pytest.param(0.6, (2,), 1, id="few alone", marks=only_full),
        pytest.param(0.4, (4,), 4, id="some alone, in parts", marks=only_full),
        pytest.param(0.0, (6, 5, 3, 2), 1, id="all, as the device chooses", marks=only_full),
        pytest.param(0.6, (6, 5, 3, 2), 4, id="few, as the device chooses, in parts"),
    ],
)
def test_an_update_is_the_same_where_blocks_without_a_mask_do_not_run(monkeypatch, share, blocks, in_parts):
    """`blocks`: how many of the six of a row the step is compiled for."""
    monkeypatch.setattr(train_step, "capacities", lambda count: blocks)
    batch, settings = prompt_batch(share), dataclasses.replace(SKIPPING, micro_batches=in_parts)
    whole, metrics = run(wedlm_step, batch)
    compiled = functools.cache(compile_step.__wrapped__)  # for these blocks alone
    some, metrics_of_some = run(wedlm_step, batch, settings=settings, compiled=compiled)
    for name in set(metrics) - {"useful_flops"}:
        np.testing.assert_allclose(metrics[name], metrics_of_some[name], rtol=1e-5, err_msg=name)
    assert metrics_of_some["useful_flops"] < metrics["useful_flops"]
    assert_same_update(whole, some, atol=1e-6)


def test_what_does_not_run_is_not_computed(monkeypatch):
    """A quarter of the prediction stream beside the memory stream: 5/8 of the arithmetic, and of the useful FLOPs."""
    batch = packed_batch(rows=1, length=512)
    batch = dataclasses.replace(batch, loss_mask=batch.loss_mask & (batch.positions >= 200))
    state = fresh_state()

    def products(settings):
        return matmul_flops(jax.make_jaxpr(functools.partial(wedlm_step, settings=settings))(state, batch).jaxpr)

    whole = products(SETTINGS)
    assert products(SKIPPING) == pytest.approx(whole, rel=0.01)  # of the branches the largest counts
    monkeypatch.setattr(train_step, "capacities", lambda blocks: (blocks // 4,))
    assert products(SKIPPING) == pytest.approx(0.625 * whole, rel=0.05)


def test_settings_that_no_step_can_have_are_refused():
    with pytest.raises(ValueError, match="skip_unread is for the dual stream"):
        dataclasses.replace(with_objective(streams="single"), skip_unread=True)
    with pytest.raises(ValueError, match="mask_token_id=None is for an adapter with rows=mask"):
        dataclasses.replace(SETTINGS, mask_token_id=None)
