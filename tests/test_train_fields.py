"""Every field of the loop changes something: they are tried one by one, with updates that cost nothing."""

import dataclasses
import sys
import types
import typing

import jax.numpy as jnp
import pytest

from tests.data.tiny import sentence, tokenizer, write_lines
from tests.tiny_training import EXPERIMENT, one_device_mesh
from wedlm_jax import train as train_module
from wedlm_jax.checkpoint import Checkpoints, chosen_step, saved_steps
from wedlm_jax.config_tree import sections_of
from wedlm_jax.data.documents import Documents
from wedlm_jax.data.tokenizer import save_tokenizer
from wedlm_jax.errors import UserError
from wedlm_jax.experiment import Experiment, override
from wedlm_jax.metrics.writers import read_metrics

BASE = override(
    EXPERIMENT, "train.log_every=2", "train.checkpoint_every=4", "train.eval_every=4", "train.keep_checkpoints=1"
)


@pytest.fixture
def seen(monkeypatch):
    """Records what the loop asks of the parts that cost something, and stands in for them."""
    seen = {"settings": None, "batches": [], "validations": None, "wandb": None, "saves": []}

    def compile_step(step, settings, mesh):
        seen["settings"] = settings.total_steps, settings.seed, settings.micro_batches, settings.skip_unread

        def update(state, batch):
            seen["batches"].append(batch.tokens.tolist())
            number = len(seen["batches"])
            metrics = {
                "loss": 1.0,
                "tokens": 1,
                "useful_flops": 1.0,
                "skipped_in_row": number - 2 if 2 < number < 6 else 0,
            }
            return dataclasses.replace(state, step=state.step + 1), {k: jnp.asarray(v) for k, v in metrics.items()}

        return update

    class Validation:
        def __init__(self, *arguments, rows, num_batches, num_samples):
            seen["validations"] = [rows, num_batches, num_samples]

        def measure(self, params, *, masks):
            seen["validations"].append(len(seen["batches"]))
            return {"validation_ar_loss": float(len(seen["batches"]))}  # the first is the best

        def samples(self, params, *, masks):
            return []

    def init(**arguments):
        seen["wandb"] = arguments["project"]
        return types.SimpleNamespace(log=lambda numbers, step: None, finish=lambda exit_code: None)

    save = Checkpoints.save
    monkeypatch.setattr(
        Checkpoints,
        "save",
        lambda self, state, step, *rest: (seen["saves"].append(step), save(self, state, step, *rest)),
    )
    monkeypatch.setattr(train_module, "make_mesh", lambda config: one_device_mesh())
    monkeypatch.setattr(train_module, "compile_step", compile_step)
    monkeypatch.setattr(train_module, "Validation", Validation)
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    return seen


def outcome(seen, workdir, *assignments: str) -> dict:
    try:
        ended = train_module.train(override(BASE, *assignments), workdir)
    except UserError as error:
        ended = str(error)
    return seen | {
        "ended": ended,
        "lines": [
            {"step": line["step"], **{k: v for k, v in line.items() if "loss" in k}} for line in read_metrics(workdir)
        ],
        "saved": saved_steps(workdir),
        "folders": sorted(path.name for path in workdir.iterdir() if path.is_dir()),
    }


CHANGES = {
    "steps": "3", "batch_size": "4", "micro_batches": "2", "seed": "1", "log_every": "1", "checkpoint_every": "8",
    "keep_checkpoints": "2", "best_metric": "validation_ar_loss", "max_skipped_in_row": "2", "eval_every": "2",
    "eval_batches": "1", "eval_samples": "0", "profile_steps": "2", "tensorboard": "true", "wandb": "mine",
    "skip_unread": "true",
}  # fmt: skip


@pytest.mark.parametrize("field", CHANGES)
def test_every_field_of_the_loop_changes_something(field, seen, tmp_path, request):
    plain = request.config.stash.setdefault(PLAIN, {})
    if not plain:
        plain |= outcome(seen, tmp_path / "plain")
        seen |= {"settings": None, "batches": [], "validations": None, "wandb": None, "saves": []}
    assert plain["ended"] is True and plain["saved"] == [6]
    changed = outcome(seen, tmp_path / "changed", f"train.{field}={CHANGES[field]}")
    assert changed != plain
    expected = {"keep_checkpoints": [4, 6], "best_metric": [4, 6], "checkpoint_every": [6]}
    assert changed["saved"] == expected.get(field, changed["saved"])


@pytest.mark.parametrize(("ar_steps", "best"), [(0, 2), (3, 4), (6, 2)])
def test_no_checkpoint_of_before_the_masks_is_the_best_of_a_run_that_has_some(ar_steps, best, seen, tmp_path):
    """The loss that is stood in here rises: adapting a base costs some of its AR loss, too."""
    fields = ("train.checkpoint_every=2", "train.eval_every=2", "train.best_metric=validation_ar_loss")
    assert outcome(seen, tmp_path, *fields, f"objective.ar_steps={ar_steps}")["saved"] == sorted({best, 6})
    assert chosen_step(tmp_path, "best") == best


def test_a_bad_record_costs_no_step_and_the_run_goes_on_without_it(seen, tmp_path):
    save_tokenizer(tokenizer(), tmp_path / "tokenizer")
    records = [{"text": sentence(number, 60)} for number in range(20)]
    path = write_lines(tmp_path / "text.jsonl", records)
    fields = (
        "data.source=text", f"data.path={path}", "data.held_out_share=0", f"tokenizer.path={tmp_path / 'tokenizer'}",
        "train.steps=12", "train.checkpoint_every=1000", "train.eval_every=0",
    )  # fmt: skip
    (example, *_) = Documents(override(BASE, *fields).data, tokenizer(), EXPERIMENT.train.seed, "train")[11].examples
    number = int(str(tokenizer().decode(example.tokens)).partition(":")[0])
    write_lines(path, [*records[:number], "{", *records[number + 1 :]])

    met = outcome(seen, tmp_path / "run", *fields)
    (step,) = met["saved"]
    assert 1 < step < 12 and len(seen["batches"]) == step
    assert met["ended"].startswith(f"{path}:{number + 1}: broken JSON")
    assert met["ended"].endswith(f"; step {step} of 12 is saved in {tmp_path / 'run'}")
    assert outcome(seen, tmp_path / "run", *fields)["ended"] == met["ended"].partition("; step")[0]
    gone_on = outcome(seen, tmp_path / "run", *fields, "data.on_bad_record=skip")
    assert gone_on["ended"] is True and [line["step"] for line in gone_on["lines"]] == [2, 4, 6, 8, 10, 12]

    batches = seen["batches"].copy()
    seen["batches"].clear()
    outcome(seen, tmp_path / "uninterrupted", *fields, "data.on_bad_record=skip")
    assert batches == seen["batches"]


PLAIN = pytest.StashKey[dict]()


def configs(cls: type = Experiment) -> set[type]:
    """The dataclasses of an experiment."""
    return {cls} | {
        inner
        for hint in typing.get_type_hints(cls).values()
        for section in sections_of(hint)
        for inner in configs(section)
    }
