"""Experiments: found by name or file, overridden by typed fields, kept as JSON; every mistake is one clear line."""

import dataclasses
import json
import os
import sys
import textwrap

import pytest

from tests.one_line import message_of
from tests.tiny_training import EXPERIMENT
from wedlm_jax.errors import UserError
from wedlm_jax.experiment import (
    AdapterConfig,
    Experiment,
    ModelConfig,
    ModelOverrides,
    Study,
    TrainConfig,
    list_experiments,
    load_experiment,
    load_named,
    override,
)

FILE = '''
    """Trains something small.

    More about it.
    """
    import dataclasses
    from wedlm_jax.experiment import Experiment, TrainConfig, load_experiment

    def small():
        return Experiment(name="small", init_from="somewhere", train=TrainConfig(steps=7))

    def smaller():
        return dataclasses.replace(small(), name="smaller")

    def derived():
        return dataclasses.replace(load_experiment("small"), name="derived")

    def no_experiment():
        return 3

    def mistyped():
        return Experiment(name="small", init_from="somewhere", train=TrainConfig(steps="many"))

    def misspelled():
        return TrainConfig(step=1)
'''


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A current folder with experiments/small.py."""
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments" / "small.py").write_text(textwrap.dedent(FILE))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_an_experiment_file_imports_what_lies_beside_it(folder):
    """When it is run, and in its function; afterwards it is looked for there no more."""
    (folder / "elsewhere").mkdir()
    (folder / "elsewhere" / "rate_beside_mine.py").write_text("STEPS = 3\n")
    (folder / "elsewhere" / "mine.py").write_text(
        "from rate_beside_mine import STEPS\n"
        "from wedlm_jax.experiment import *\n"
        "def mine():\n"
        "    import rate_beside_mine\n"
        "    return Experiment(name='mine', init_from='base', train=TrainConfig(steps=STEPS * rate_beside_mine.STEPS))\n"
    )
    before = list(sys.path)
    assert load_experiment("elsewhere/mine.py").train.steps == 9
    assert sys.path == before


def test_an_experiment_is_found_by_name_in_the_current_folder_first():
    assert load_experiment("small").train.steps == 7
    assert load_experiment("small").workdir.as_posix() == "runs/small"


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        ("experiments/small.py", "small"),
        ("experiments/small.py:smaller", "smaller"),
        ("experiments/small.py:derived", "derived"),
        ("small:smaller", "smaller"),
        ("~/experiments/small.py", "small"),  # which no shell writes out behind --exp=
    ],
)
def test_an_experiment_is_a_function_of_a_file(spec, name, monkeypatch):
    monkeypatch.setenv("HOME", os.getcwd())
    assert load_experiment(spec).name == name


def test_the_list_shows_the_first_line_of_each_docstring():
    assert list_experiments()["small"] == "Trains something small."


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("smal", "unknown experiment smal; did you mean small?"),
        ("missing.py", "missing.py: no such file"),
        ("small:absent", "experiments/small.py has no function absent"),
        ("small:no_experiment", "no_experiment() returns int, not an Experiment"),
        ("small:mistyped", "small.py:22: TypeError"),
        (
            "small:misspelled",
            "small.py:25: TypeError: TrainConfig.__init__() got an unexpected keyword argument 'step'",
        ),
    ],
)
def test_an_experiment_that_is_not_there_or_broken_is_named(spec, message):
    assert message in message_of(load_experiment, spec)


def test_a_syntax_error_is_told_with_its_line(folder):
    (folder / "broken.py").write_text("def broken():\n  return (\n")
    assert "broken.py:2: " in message_of(load_experiment, "broken.py")
    (folder / "experiments" / "latin.py").write_bytes(b'"""Caf\xe9."""\n')
    assert "broken" in list_experiments()["latin"] and list_experiments()["small"] == "Trains something small."


@pytest.mark.parametrize(
    ("assignment", "read"),
    [
        ("train.steps=12", lambda e: e.train.steps == 12),
        ("optimizer.learning_rate=1e-4", lambda e: e.optimizer.learning_rate == 1e-4),
        ("model.remat=full", lambda e: e.model.remat == "full"),
        ("objective.in_block=bidirectional", lambda e: e.objective.in_block == "bidirectional"),
        ("model.tie_word_embeddings=false", lambda e: e.model.tie_word_embeddings is False),
        ("evaluation.tasks=counting,copying", lambda e: e.evaluation.tasks == ("counting", "copying")),
        ("evaluation.entropy_thresholds=[0.1, inf]", lambda e: e.evaluation.entropy_thresholds == (0.1, float("inf"))),
        ("init_from=runs/a=b", lambda e: e.init_from == "runs/a=b"),
        ("tokenizer.path=none", lambda e: e.tokenizer.path is None),
        ("name=none", lambda e: e.name == "none"),
    ],
)
def test_an_override_is_read_as_the_type_of_its_field(assignment, read):
    assert read(override(EXPERIMENT, assignment))


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("train.steps", "'train.steps' is not an override; write section.field=value"),
        ("train.stepz=3", "unknown field train.stepz; did you mean train.steps?"),
        ("learning_rate=3", "unknown field learning_rate; did you mean optimizer.learning_rate?"),
        ("zzz=3", "unknown field zzz; the sections are model"),
        ("train=3", "train is a section; set one of its fields: train.steps"),
        ("train.steps=1.5", "train.steps='1.5': input should be a valid integer"),
        ("train.steps=0", "train.steps=0 must be at least 1"),
        ("train.seed=2147483648", "train.seed=2147483648: must fit in 32 bits"),
        ("optimizer.warmup_steps=99999999999", "optimizer.warmup_steps=99999999999: must fit in 32 bits"),
        ("tokenizer.vocab_size=99999999999999999999", "tokenizer.vocab_size=99999999999999999999: must fit in 32 bits"),
        ("data.num_end_tokens=4294967296", "data.num_end_tokens=4294967296: must fit in 32 bits"),
        ("train.micro_batches=3", "train.batch_size=2 is not a multiple of train.micro_batches=3"),
        ("model.remat=perhaps", "model.remat='perhaps': input should be 'none', 'dots', 'attention' or 'full'"),
        (
            "optimizer.schedule=cosinus",
            "optimizer.schedule='cosinus': input should be 'constant', 'cosine' or 'linear'",
        ),
        ("optimizer.learning_rate=-1", "optimizer.learning_rate=-1.0 must be above 0"),
        ("data.row_length=100", "data.row_length=100 is not a multiple of objective.block_size=16"),
    ],
)
def test_a_bad_override_is_one_line_that_names_the_field(assignment, message):
    assert message in message_of(override, EXPERIMENT, assignment)


def test_an_integer_of_a_file_that_does_not_fit_in_32_bits_is_named():
    text = EXPERIMENT.to_json().replace('"seed": 0', f'"seed": {2**31}')
    assert message_of(Experiment.from_json, text) == "experiment: train.seed=2147483648: must fit in 32 bits"
    assert override(EXPERIMENT, f"train.seed={2**31 - 1}").train.seed == 2**31 - 1


def test_the_order_of_overrides_does_not_matter():
    """Each of the two is refused alone."""
    overrides = ("train.micro_batches=4", "train.batch_size=8")
    for order in (overrides, overrides[::-1]):
        assert override(EXPERIMENT, *order).train.micro_batches == 4
    with pytest.raises(UserError):
        override(EXPERIMENT, overrides[0])


FROM_ELSEWHERE = dataclasses.replace(EXPERIMENT, model=None, init_from="somewhere")


def test_model_path_is_init_from():
    assert override(FROM_ELSEWHERE, "model.path=DIR").init_from == "DIR"


def test_a_model_that_comes_from_elsewhere_may_be_computed_otherwise(folder):
    experiment = override(FROM_ELSEWHERE, "model.matmul_precision=highest", "model.dtype=bfloat16")
    assert experiment.model == ModelOverrides(matmul_precision="highest", dtype="bfloat16")
    assert Experiment.from_json(experiment.to_json()) == experiment
    assert override(experiment, "model.dtype=none").model == ModelOverrides(matmul_precision="highest")


def test_the_shape_of_a_model_that_comes_from_elsewhere_is_not_to_be_set():
    message = message_of(override, FROM_ELSEWHERE, "model.hidden_size=64")
    assert "model.hidden_size: the model is as in init_from=somewhere; model.dtype" in message
    assert "init_from are both None" in message_of(
        override(EXPERIMENT, "model=none", "model.dtype=bfloat16").require_model
    )


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["name="], "name= is no folder below runs/; choose one, or another place as --workdir DIR"),
        (["name=."], "name=. is no folder below runs/"),
        (["name=../.."], "name=../.. is no folder below runs/"),
        (["name=/tmp/x"], "name=/tmp/x is no folder below runs/"),
        (
            ["train.best_metric=validation_mlm_loss", "train.steps=4", "train.checkpoint_every=2", "train.eval_every=2",
             "objective.ar_steps=4"],
            "train.best_metric=validation_mlm_loss is never measured: all train.steps=4 are of objective.ar_steps=4; choose",
        ),
    ],
)  # fmt: skip
def test_what_could_never_be_is_refused(overrides, message):
    assert message_of(override, EXPERIMENT, *overrides).startswith(message)


def test_json_and_back_is_the_identity(folder):
    experiment = override(EXPERIMENT, "evaluation.entropy_thresholds=0.1,inf")
    assert Experiment.from_json(experiment.to_json()) == experiment
    (folder / "experiment.json").write_text(experiment.to_json())
    assert Experiment.load(folder) == experiment


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"steps"', '"stepz"', "x.json: unknown field train.stepz; did you mean train.steps?"),
        ('"steps": 6', '"steps": "six"', "x.json: train.steps: input should be a valid integer"),
        ('"head_dim": 8', '"head_dim": 7', "model.head_dim=7 is odd"),
        ('"name": "tiny",', "", "x.json: name: field required"),
        ("{", "", "x.json:"),
        (EXPERIMENT.to_json(), "[]", "x.json: holds no experiment"),
    ],
)
def test_broken_json_is_one_line(old, new, message):
    text = EXPERIMENT.to_json().replace(old, new, 1)
    assert message in message_of(Experiment.from_json, text, "x.json")


def test_a_folder_without_experiment_says_what_writes_it(tmp_path):
    assert "python -m wedlm_jax.train --exp NAME" in message_of(Experiment.load, tmp_path / "absent")


NUMBERS = [field.name for field in dataclasses.fields(TrainConfig) if field.type == "int"]


@pytest.mark.parametrize("field", NUMBERS)
def test_every_number_of_the_loop_has_a_least_value(field):
    assert f"train.{field}=-1 must be at least" in message_of(lambda: TrainConfig(**{field: -1}))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(best_metric="validation_ar_loss"), "train.eval_every=0 steps; set that to a divisor of"),
        (dict(best_metric="validation_ar_loss", eval_every=3, checkpoint_every=10), "of train.checkpoint_every=10"),
        (dict(profile_steps=(0,)), "train.profile_steps=0 is not a step"),
        (dict(wandb=" "), "train.wandb is empty; name a project, or set train.wandb=None"),
        (
            dict(profile_steps=(5, 11), steps=10),
            "train.profile_steps=11 is not a step; choose from 1 to train.steps=10",
        ),
    ],
)
def test_fields_of_the_loop_that_do_not_go_together_are_named(fields, message):
    assert message in message_of(lambda: TrainConfig(**fields))


def test_a_config_given_the_wrong_type_in_a_file_is_told(folder):
    (folder / "typed.py").write_text(
        "from wedlm_jax.experiment import *\ndef typed():\n    return Experiment(name='a', init_from=3)\n"
    )
    assert "init_from" in message_of(load_experiment, "typed.py")


def test_the_shipped_experiments_load_and_have_a_summary(monkeypatch, folder):
    monkeypatch.chdir(folder / "experiments" / "..")
    shipped = {name: summary for name, summary in list_experiments().items() if name != "small"}
    assert {"quickstart_base", "quickstart"} <= shipped.keys()
    for name, summary in shipped.items():
        found = load_named(name)
        assert summary and found.name == name
        if isinstance(found, Study):  # every run that it would start can be loaded
            stages = {stage for arm in found.arms.values() for stage in arm}
            assert all(load_experiment(stage.experiment, stage.overrides).train.steps for stage in stages)
        else:
            assert isinstance(found.model, ModelConfig | ModelOverrides | None)


def test_a_study_is_run_whole_by_train_alone(monkeypatch, folder):
    monkeypatch.chdir(folder / "experiments" / "..")
    assert "ablations is a study of several runs; python -m wedlm_jax.train --exp ablations" in message_of(
        load_experiment, "ablations"
    )
    assert "train.steps=3: ablations is a study" in message_of(load_named, "ablations", ["train.steps=3"])


def test_an_experiment_without_a_model_asks_for_one_where_it_is_used(monkeypatch, folder):
    monkeypatch.chdir(folder / "experiments" / "..")
    assert "name a model to start from as model.path=DIR" in message_of(load_experiment("sft").require_model)
    assert "name a model to start from as model.path=DIR" in message_of(
        load_experiment("sft", ["data.path=x"]).require_model
    )
    load_experiment("sft", ["data.path=chat.jsonl", "model.path=DIR"]).require_model()


@pytest.mark.parametrize("override", ["model.path=", "init_from=", "init_from= "])
def test_a_model_to_start_from_that_is_named_by_nothing_is_refused(override):
    """An empty shell variable would start from random weights else."""
    assert "init_from is empty" in message_of(load_experiment, "sft", ["data.path=x", override])


def test_an_unknown_field_inside_a_mixture_is_named(monkeypatch, folder):
    monkeypatch.chdir(folder / "experiments" / "..")
    tree = load_experiment("qwen3_8b_cpt").to_dict()
    tree["data"]["mixture"][1]["wieght"] = 3
    assert "data.mixture.1.wieght: unexpected keyword" in message_of(Experiment.from_json, json.dumps(tree), "x.json")


def test_a_section_inside_a_section_is_set_by_its_fields_and_begins_with_its_defaults():
    base = Experiment("x", init_from="y")
    assert override(base, "objective.ar_loss_weight=0", "model.adapter.rank=3").adapter == AdapterConfig(rank=3)
    objective = ("objective.ar_loss_weight=0", "model.adapter.targets=q_proj,v_proj", "model.adapter.rows=mask")
    changed = override(base, *objective)
    assert changed.adapter == AdapterConfig(targets=("q_proj", "v_proj"))
    assert Experiment.from_json(changed.to_json()) == changed
    assert override(changed, "model.adapter=none").adapter is None
    with pytest.raises(UserError, match=r"objective.ar_loss_weight=1.0 has no meaning .* set it to 0"):
        override(changed, "objective.ar_loss_weight=1")
    with pytest.raises(UserError, match="model.adapter is a section; set one of its fields: model.adapter.rank"):
        override(base, "model.adapter=3")
    with pytest.raises(UserError, match="adapter.rank=0 must be at least 1"):
        override(base, "model.adapter.rank=0")


def test_a_mixture_can_be_written_as_json(monkeypatch, folder):
    monkeypatch.chdir(folder / "experiments" / "..")

    def mixed(text):
        return load_experiment("sft", ["model.path=DIR", "data.source=mixture", f"data.mixture={text}"]).data.mixture

    (chat, code) = mixed('[{"source": "chat", "path": "a.jsonl", "weight": 2}, {"source": "text", "path": "src"}]')
    assert (chat.source, chat.path, chat.weight, code.path) == ("chat", "a.jsonl", 2.0, "src")
    assert "no JSON (Expecting value); write a list of objects" in message_of(mixed, "chat,text")
    for name in ("wieght", "Weight"):
        assert f"{name}: unexpected keyword argument" in message_of(mixed, f'[{{"source": "chat", "{name}": 2}}]')


def skips(*overrides, **model):
    experiment = override(EXPERIMENT, *overrides)
    return experiment.step_settings(dataclasses.replace(experiment.model, **model), 1).skip_unread


MASK_ROWS = {"adapter": AdapterConfig(rank=1)}
OF_ADAPTER = ("objective.ar_loss_weight=0", "objective.ar_steps=0")


def test_blocks_are_left_out_unasked_of_long_rows_with_prompts():
    prompts, text = ("data.source=quickstart_tasks",), ("data.source=text", "data.path=x")
    assert not skips(*prompts, "data.row_length=496")
    assert skips(*prompts, "data.row_length=512")
    assert not skips(*text, "data.row_length=512")
    assert skips(*text, "train.skip_unread=true")
    table = ("data.source=parquet", "data.path=x", "data.row_length=512")
    assert skips(*table) and not skips(*table, "data.text_column=text")
    for name in ("qwen3_8b_cpt", "qwen25_7b_cpt"):
        assert not load_experiment(name).data.has_prompts
    assert not skips(*prompts, "data.row_length=512", "train.skip_unread=false")
    assert not skips(*prompts, "data.row_length=512", "objective.streams=single")
    assert not skips(*prompts, "data.row_length=512", *OF_ADAPTER, **MASK_ROWS)


@pytest.mark.parametrize(
    ("overrides", "model"),
    [
        (("objective.streams=single", "train.skip_unread=true"), {}),
        ((*OF_ADAPTER, "train.skip_unread=false"), MASK_ROWS),
    ],
)
def test_leaving_blocks_out_is_not_asked_where_it_has_no_meaning(overrides, model):
    assert message_of(lambda: skips(*overrides, **model)).startswith("train.skip_unread=")
