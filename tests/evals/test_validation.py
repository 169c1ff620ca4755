"""A look at held-out data: the same rows and masks each time, and the very loss that training has."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.tiny_training import EXPERIMENT, MODEL, one_device_mesh
from wedlm_jax.data.pipeline import batches, make_tokenizer
from wedlm_jax.evals.validation import SEED, Validation, prompts
from wedlm_jax.model.parameters import init_params
from wedlm_jax.train_state import new_state
from wedlm_jax.train_step import StepSettings, place, wedlm_step

SETTINGS = StepSettings(MODEL, EXPERIMENT.objective, EXPERIMENT.optimizer, mask_token_id=3, total_steps=6, seed=7)


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer(EXPERIMENT.tokenizer, EXPERIMENT.data)


def validation(tokenizer, settings=SETTINGS, **counts):
    counts = {"rows": 2, "num_batches": 2, "num_samples": 0} | counts
    return Validation(EXPERIMENT.data, EXPERIMENT.evaluation, settings, tokenizer, (2,), one_device_mesh(), **counts)


@pytest.fixture(scope="module")
def params():
    return init_params(MODEL, 0)


def test_it_measures_the_loss_of_training_on_the_same_rows_and_masks_each_time(tokenizer, params):
    look = validation(tokenizer, num_batches=1)
    measured = look.measure(params, masks=True)
    assert (
        measured == look.measure(params, masks=True) == validation(tokenizer, num_batches=1).measure(params, masks=True)
    )
    stream = batches(EXPERIMENT.data, tokenizer, SETTINGS.objective.block_size, 2, SEED, "held_out")
    state = new_state(params, SETTINGS.optimizer)
    settings = dataclasses.replace(SETTINGS, seed=SEED)
    _, metrics = jax.jit(wedlm_step, static_argnames="settings")(
        state, place(next(stream), one_device_mesh()), settings=settings
    )
    for name, value in measured.items():
        if value is not None:
            np.testing.assert_allclose(value, metrics[name.removeprefix("validation_")], rtol=1e-5, err_msg=name)
    ar = look.measure(params, masks=False)
    np.testing.assert_allclose(ar["validation_ar_loss"], measured["validation_ar_loss"], rtol=1e-5)
    assert list(ar) == ["validation_ar_loss"]


def test_more_batches_are_averaged(tokenizer, params):
    one, two = (validation(tokenizer, num_batches=n).measure(params, masks=True) for n in (1, 2))
    assert one.keys() == two.keys() and one != two


@pytest.mark.parametrize("masks", [True, False])
def test_micro_batches_change_no_held_out_loss(tokenizer, params, masks):
    whole, in_two = (
        validation(tokenizer, dataclasses.replace(SETTINGS, micro_batches=n)).measure(params, masks=masks)
        for n in (1, 2)
    )
    assert whole.keys() == in_two.keys()
    for name, value in whole.items():
        np.testing.assert_allclose(np.float32(in_two[name]), np.float32(value), rtol=1e-5, err_msg=name)


def test_prompts_are_what_comes_before_the_learned_tokens(tokenizer):
    stream = batches(EXPERIMENT.data, tokenizer, SETTINGS.objective.block_size, 2, SEED, "held_out")
    batch = next(stream)
    texts = [tokenizer.decode(prompt) for prompt in prompts(batch)]
    assert texts and all(text.startswith("Q:") and text.endswith("A:") for text in texts)
    plain = dataclasses.replace(batch, loss_mask=batch.segment_ids > 0)
    longest = max(int((row == n).sum()) for row in batch.segment_ids for n in range(1, int(row.max()) + 1))
    assert max(map(len, prompts(plain))) == int(0.25 * longest)


def test_samples_say_what_they_are(tokenizer, params):
    experiment = dataclasses.replace(EXPERIMENT.evaluation, max_new_tokens=4, window_size=4)
    look = Validation(
        EXPERIMENT.data, experiment, SETTINGS, tokenizer, (2,), one_device_mesh(), rows=2, num_batches=1, num_samples=2
    )
    samples = look.samples(jax.tree.map(jnp.asarray, params), masks=True)
    assert [sample["number"] for sample in samples] == [0, 1]
    assert all(sample["decoder"] == "verified" and sample["tokens_per_forward"] >= 1 for sample in samples)
    assert all(sample["prompt"].startswith("Q:") and isinstance(sample["completion"], str) for sample in samples)
