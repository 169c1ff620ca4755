"""A look at held-out data: the same rows and masks each time, and the very loss that training has."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.tiny_training import EXPERIMENT, MODEL, one_device_mesh
from wedlm_jax.data.config import DataConfig
from wedlm_jax.data.pipeline import batches
from wedlm_jax.data.tokenizer_training import make_tokenizer
from wedlm_jax.evals.validation import SEED, Validation, prompts
from wedlm_jax.model.parameters import init_params
from wedlm_jax.step_metrics import LOSS_BY_RATIO, masked_by_ratio
from wedlm_jax.train_state import new_state
from wedlm_jax.train_step import (
    StepSettings,
    corrupted_streams,
    place,
    wedlm_step,
)

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


@pytest.fixture(scope="module")
def in_training(tokenizer, params):
    """Of the first two batches, each alone: the metrics of a training step, and the masked tokens of each mask ratio."""
    stream = batches(EXPERIMENT.data, tokenizer, SETTINGS.objective.block_size, 2, SEED, "held_out")
    settings, found = dataclasses.replace(SETTINGS, seed=SEED), []
    step, draw = (jax.jit(f, static_argnames="settings") for f in (wedlm_step, corrupted_streams))
    for number in range(2):
        batch = place(next(stream), one_device_mesh())
        state = dataclasses.replace(new_state(params, settings.optimizer), step=jnp.int32(number))
        masked = masked_by_ratio(draw(state.step, batch, settings=settings))
        found.append((step(state, batch, settings=settings)[1], {name: int(x.sum()) for name, x in masked.items()}))
    return found


def test_it_measures_the_loss_of_training_on_the_same_rows_and_masks_each_time(tokenizer, params, in_training):
    look = validation(tokenizer, num_batches=1)
    measured = look.measure(params, masks=True)
    assert (
        measured == look.measure(params, masks=True) == validation(tokenizer, num_batches=1).measure(params, masks=True)
    )
    metrics, _ = in_training[0]
    for name, value in measured.items():
        if value is not None:
            np.testing.assert_allclose(value, metrics[name.removeprefix("validation_")], rtol=1e-5, err_msg=name)
    ar = look.measure(params, masks=False)
    np.testing.assert_allclose(ar["validation_ar_loss"], measured["validation_ar_loss"], rtol=1e-5)
    assert list(ar) == ["validation_ar_loss"]


def test_losses_of_several_batches_are_averaged_and_those_by_mask_ratio_over_the_masked_tokens(
    tokenizer, params, in_training
):
    (one, _), (other, _) = in_training
    measured = validation(tokenizer, num_batches=2).measure(params, masks=True)
    for name in ("ar_loss", "mlm_loss"):
        assert abs(one[name] - other[name]) > 2e-4
        np.testing.assert_allclose(measured.pop(f"validation_{name}"), (one[name] + other[name]) / 2, rtol=1e-5)
    assert list(measured) == [f"validation_{name}" for name in LOSS_BY_RATIO]
    for name in LOSS_BY_RATIO:
        found = [(metrics[name], counts[name]) for metrics, counts in in_training if counts[name]]
        mean = np.average([loss for loss, _ in found], weights=[count for _, count in found])
        np.testing.assert_allclose(measured[f"validation_{name}"], mean, rtol=1e-5, err_msg=name)


def test_a_batch_without_masks_counts_in_no_mean(tokenizer, params, tmp_path):
    """Short answers to long prompts, one a batch: some drew no mask, and a loss of 0 each made the mean too good. A model that
    knows nothing has a loss of log V, whatever was drawn."""
    questions = ({"prompt": f"Q: {n} " + 12 * "and so on ", "completion": str(n % 10)} for n in range(40))
    file = tmp_path / "short.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in questions))
    data = DataConfig(
        source="chat", path=str(file), plain_prompt=True, num_end_tokens=1, row_length=128, held_out_share=0.5
    )
    look = Validation(
        data, EXPERIMENT.evaluation, SETTINGS, tokenizer, (2,), one_device_mesh(), rows=1, num_batches=12, num_samples=0
    )
    measured = look.measure(params | {"final_norm.scale": jnp.zeros(MODEL.hidden_size)}, masks=True)
    for name, value in measured.items():
        if value is not None:
            np.testing.assert_allclose(value, np.log(MODEL.vocab_size), rtol=1e-5, err_msg=name)


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


def test_few_held_out_documents_are_told_and_none_is_shown_twice(tokenizer, params, tmp_path, capsys):
    """They come again until the batches are full: without a word, many rows would seem to have been measured."""
    texts = tmp_path / "few.jsonl"
    texts.write_text("".join(json.dumps({"text": 12 * str(n)}) + "\n" for n in range(6)))
    look = Validation(
        DataConfig(source="text", path=str(texts), row_length=64, held_out_share=0.5),
        dataclasses.replace(EXPERIMENT.evaluation, max_new_tokens=4, window_size=4),
        SETTINGS, tokenizer, (2,), one_device_mesh(), rows=2, num_batches=2, num_samples=9,
    )  # fmt: skip
    shown = [sample["prompt"] for sample in look.samples(jax.tree.map(jnp.asarray, params), masks=True)]
    assert 0 < len(shown) == len(set(shown)) < 6
    told = capsys.readouterr().err
    assert told.startswith(f"note: different held-out documents: {len(shown)}; they come again, "), told
    assert "; a larger data.held_out_share, in another workdir, holds out more" in told
    validation(tokenizer)
    assert capsys.readouterr().err == ""


def test_of_data_with_a_share_of_their_own_more_are_asked_for(tokenizer, capsys):
    """`held_out_share`, which would be offered otherwise, is refused there."""
    few = dataclasses.replace(EXPERIMENT.data, num_problems=2)
    Validation(
        few, EXPERIMENT.evaluation, SETTINGS, tokenizer, (2,), one_device_mesh(), rows=2, num_batches=2, num_samples=0
    )
    told = capsys.readouterr().err
    assert told.startswith("note: different held-out documents: 2;") and "; more data, in another workdir, " in told
