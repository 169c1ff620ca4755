"""The training loop with an adapter: its base is read where it was found, and a killed run goes on bit for bit."""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from transformers import AutoTokenizer

import wedlm_jax
from tests.killed_training import train_until_killed
from tests.tiny_training import EXPERIMENT, one_device_mesh
from tests.two_capacities import with_two_capacities
from wedlm_jax import train as train_module
from wedlm_jax.checkpoint import load_params
from wedlm_jax.errors import UserError
from wedlm_jax.experiment import load_experiment, override
from wedlm_jax.model.adapter import AdapterConfig, split_adapter
from wedlm_jax.model.config import ModelOverrides
from wedlm_jax.model.parameters import init_params, params_of
from wedlm_jax.model_file import ModelFile
from wedlm_jax.train import train


@pytest.fixture(autouse=True, scope="module")
def one_device():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_module, "make_mesh", lambda config: one_device_mesh())
        with_two_capacities(patch)
        yield


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("base")
    changes = dict(steps=1, checkpoint_every=1)
    train(dataclasses.replace(EXPERIMENT, train=dataclasses.replace(EXPERIMENT.train, **changes)), workdir)
    return workdir


def experiment(base):
    return dataclasses.replace(
        EXPERIMENT,
        init_from=str(base),
        model=ModelOverrides(adapter=AdapterConfig(rank=2), param_dtype="bfloat16"),
        objective=dataclasses.replace(EXPERIMENT.objective, ar_loss_weight=0, targets="distill"),
        train=dataclasses.replace(EXPERIMENT.train, steps=4),
    )


@pytest.fixture(scope="module")
def finished(base, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("finished")
    train(experiment(base), workdir)
    return workdir


def test_a_checkpoint_holds_the_adapter_alone_and_loads_with_its_base(base, finished):
    config, own = load_params(finished)
    assert own.keys() == split_adapter(jax.eval_shape(lambda: init_params(config, 0)))[1].keys()
    assert any(np.any(x) for name, x in own.items() if name.endswith("lora_b"))
    model = wedlm_jax.load(finished)
    assert model.config.adapter == AdapterConfig(rank=2) and model.source == f"{base}@1"
    for name, value in params_of(wedlm_jax.load(base).transformer).items():
        np.testing.assert_array_equal(params_of(model.transformer)[name], value)


def test_a_killed_run_resumes_to_the_same_end_bit_for_bit(base, finished, tmp_path):
    train_until_killed(experiment(base), tmp_path, draws=3)
    train(experiment(base), tmp_path)
    for name, value in load_params(finished)[1].items():
        np.testing.assert_array_equal(load_params(tmp_path)[1][name], value, err_msg=name)


def test_beside_a_base_whose_vocabulary_is_full_no_mask_token_is_needed(base, tmp_path):
    full = tmp_path / "full"
    wedlm_jax.save(wedlm_jax.load(base), full, "qwen3")
    raw = json.loads((full / "config.json").read_text())
    del raw["mask_token_id"]
    (full / "config.json").write_text(json.dumps(raw))
    tokenizer = AutoTokenizer.from_pretrained(full)
    tokenizer.mask_token = None
    tokenizer.add_tokens([f"<{i}>" for i in range(raw["vocab_size"] - len(tokenizer))])
    tokenizer.save_pretrained(full)
    changed = dataclasses.replace(experiment(base), init_from=str(full))
    train(dataclasses.replace(changed, train=dataclasses.replace(changed.train, steps=1)), tmp_path / "adapter")
    verified, ar = (wedlm_jax.DecodeConfig(decoder=name, max_new_tokens=12) for name in ("verified", "ar"))
    model = wedlm_jax.load(tmp_path / "adapter")
    assert model.mask_token_id is None
    assert (
        wedlm_jax.generate(model, ["Q:"], verified)[0].ids
        == wedlm_jax.generate(wedlm_jax.load(full), ["Q:"], ar)[0].ids
    )
    with pytest.raises(UserError, match="no free row for a mask token.*an adapter of mask rows needs none"):
        train(dataclasses.replace(EXPERIMENT, init_from=str(full), model=None), tmp_path / "all")


def test_another_base_in_the_place_of_the_first_is_refused(finished, tmp_path):
    copied = tmp_path / "copy"
    copied.mkdir()
    described = json.loads((finished / "model.json").read_text())
    described["base"]["revision"] = "0" * 32
    (copied / "model.json").write_text(json.dumps(described))
    base = ModelFile.read(copied).base
    model = wedlm_jax.load(base.path)
    with pytest.raises(UserError, match="the adapter was trained beside it at revision 0000.*; bring that model back"):
        base.check(model.config, params_of(model.transformer))


def test_an_adapter_without_a_model_to_start_from_is_refused(tmp_path):
    model = dataclasses.replace(EXPERIMENT.model, adapter=AdapterConfig())
    objective = dataclasses.replace(EXPERIMENT.objective, ar_loss_weight=0)
    with pytest.raises(UserError, match="tiny trains an adapter; name the model that it is for as init_from"):
        train(dataclasses.replace(EXPERIMENT, model=model, objective=objective), tmp_path / "run")


def test_no_adapter_of_mask_rows_is_chosen_by_a_loss_of_its_base(base, tmp_path):
    """It is one number for all checkpoints, and the first of equals, the least trained one, would be the best."""
    watched = dict(eval_every=2, checkpoint_every=2, best_metric="validation_ar_loss")
    found = experiment(base)
    with pytest.raises(
        UserError, match="best_metric=validation_ar_loss is the base's at .* choose validation_mlm_loss"
    ):
        train(dataclasses.replace(found, train=dataclasses.replace(found.train, **watched)), tmp_path / "run")


@pytest.mark.parametrize(("name", "most"), [("qwen3_0p6b_adapter", 0.01), ("qwen3_8b_adapter", 0.01)])
def test_the_adapters_of_the_experiments_are_small(name, most):
    found = override(load_experiment(name), "data.path=chat.jsonl")
    base, own = split_adapter(jax.eval_shape(lambda: init_params(found.model, 0)))
    trained, frozen = (sum(x.size for x in part.values()) for part in (own, base))
    assert 0.005 < trained / frozen < most
    assert all(x.dtype == "bfloat16" for x in base.values())
    assert f"{trained / 1e6:.3g}M parameters" in (Path(__file__).parents[1] / "experiments" / f"{name}.py").read_text()
