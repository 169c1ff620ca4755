"""The loop: a run that was cut off ends as if it had not been, and what it needs is asked for in one line."""

import copy
import dataclasses
import itertools
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from tests.bad_input import full_disk
from tests.data.tiny import chat_file
from tests.evals.models import tiny_model
from tests.killed_training import train_until_killed
from tests.one_line import message_of
from tests.tiny_training import EXPERIMENT, one_device_mesh
from wedlm_jax import train as train_module
from wedlm_jax import train_step
from wedlm_jax.checkpoint import Checkpoints, load_params, saved_steps
from wedlm_jax.data.tokenizer import load_tokenizer, save_tokenizer, train_tokenizer
from wedlm_jax.decode.prompts import render_messages
from wedlm_jax.errors import UserError
from wedlm_jax.experiment import Experiment, override
from wedlm_jax.metrics.throughput import TIME_FIELDS
from wedlm_jax.metrics.writers import read_metrics
from wedlm_jax.model.config import ModelOverrides, by_means_of
from wedlm_jax.model_file import ModelFile
from wedlm_jax.preemption import Termination
from wedlm_jax.pretrained import load, locate, save
from wedlm_jax.resuming import note_experiment
from wedlm_jax.train import main, stop_if_not_finite, train
from wedlm_jax.workdir import prepare_workdir, progress_of


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
    monkeypatch.setattr(train_module, "make_mesh", lambda config: one_device_mesh())


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """An uninterrupted run of EXPERIMENT."""
    workdir = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_module, "make_mesh", lambda config: one_device_mesh())
        train(EXPERIMENT, workdir)
    return workdir


def with_overrides(*assignments: str):
    return override(EXPERIMENT, *assignments)


def lines_without_time(workdir) -> list[dict]:
    return [{k: v for k, v in line.items() if k not in TIME_FIELDS} for line in read_metrics(workdir)]


def test_a_run_leaves_a_workdir_that_load_reads(finished):
    assert saved_steps(finished) == [4, 6]
    assert [line["step"] for line in read_metrics(finished)] == [1, 2, 3, 4, 5, 6]
    model = load(finished)
    assert model.config == EXPERIMENT.model
    assert model.tokenizer.convert_ids_to_tokens(model.mask_token_id) == "<|mask|>"
    assert model.eos_token_ids == (model.tokenizer.eos_token_id,)


def test_the_workdir_is_its_own_from_the_first_file_on(tmp_path, monkeypatch):
    """Another start, while this one still opens its data, would leave its own experiment.json."""
    enter = "import sys, pathlib, wedlm_jax.sole_writer as s; s._GRACE = 0; s.sole_writer(pathlib.Path(sys.argv[1])).__enter__()"

    def opened(*args, **kwargs):
        another = subprocess.run([sys.executable, "-c", enter, tmp_path / "run"], capture_output=True, text=True)
        raise UserError(another.stderr.splitlines()[-1])

    monkeypatch.setattr(train_module, "batches", opened)
    assert "another training is at work there" in message_of(train, EXPERIMENT, tmp_path / "run")


def test_a_workdir_in_which_another_training_has_begun_meanwhile_is_left_alone(finished, tmp_path):
    folder = shutil.copytree(finished, tmp_path / "run")
    with pytest.raises(UserError, match="run: another training has begun there meanwhile; choose another --workdir"):
        prepare_workdir(EXPERIMENT, None, EXPERIMENT.model, folder)


def test_the_rates_leave_out_that_the_second_program_is_compiled(tmp_path, monkeypatch):
    """That of the masked-token loss, in the midst of a run."""
    compile_step, seconds = train_module.compile_step, 3

    def slow(step, settings, mesh):
        update, calls = compile_step(step, settings, mesh), itertools.count()

        def run(*args):
            if next(calls) == 0:
                time.sleep(seconds)
            return update(*args)

        return run

    monkeypatch.setattr(train_module, "compile_step", slow)
    experiment = with_overrides("objective.ar_steps=3", "train.steps=5", "train.log_every=1")
    train(experiment, tmp_path)
    tokens = experiment.train.batch_size * experiment.data.row_length
    rates = {line["step"]: line.get("tokens_per_second") for line in read_metrics(tmp_path)}
    assert min(rates[step] for step in (3, 4, 5)) > tokens / seconds


def test_a_checkpoint_holds_the_number_of_records_of_each_source(finished):
    assert json.loads((finished / "checkpoints" / "6" / "data" / "metadata").read_text())["records"] == [50]


def test_a_killed_run_resumes_to_the_same_end_bit_for_bit(finished, tmp_path):
    """Parameters, optimizer, order of the data and metrics; killed twice, once before the first checkpoint."""
    for draws in (1, 4):
        train_until_killed(EXPERIMENT, tmp_path, draws)
    train(EXPERIMENT, tmp_path)

    assert lines_without_time(tmp_path) == lines_without_time(finished)
    for step in (4, 6):
        (_, expected), (_, resumed) = load_params(finished, step), load_params(tmp_path, step)
        for name, value in expected.items():
            np.testing.assert_array_equal(resumed[name], value, err_msg=name)


def test_a_checkpoint_that_could_not_be_written_ends_the_run_at_once(tmp_path, monkeypatch):
    """Not at the next one, hours later, which would not be saved either."""

    def fails(checkpoints, state, step, *arguments):  # as a save in the background does, between two steps
        assert step == 3
        checkpoints._saving, checkpoints._manager.failure = step, OSError("disk full")

    monkeypatch.setattr(Checkpoints, "save", fails)
    experiment = with_overrides("train.steps=9", "train.checkpoint_every=3", "train.log_every=1")
    assert "checkpoints/3: the checkpoint could not be written" in message_of(train, experiment, tmp_path)
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2, 3]


def test_a_signal_ends_no_run_whose_last_checkpoint_is_being_written(tmp_path, monkeypatch):
    save, wait, noted_behind = Checkpoints.save, Checkpoints.wait, {}

    def saves(checkpoints, state, step, *arguments):
        save(checkpoints, state, step, *arguments)
        noted_behind[step] = []

    def waits(checkpoints):
        handler = signal.getsignal(signal.SIGTERM)
        for noted in noted_behind.values():
            noted.append(isinstance(getattr(handler, "__self__", None), Termination))
        wait(checkpoints)

    monkeypatch.setattr(Checkpoints, "save", saves)
    monkeypatch.setattr(Checkpoints, "wait", waits)
    train(with_overrides("train.steps=2"), tmp_path)
    assert noted_behind[2][0], "who waits for the last one first still notes signals"


@pytest.mark.parametrize("changes", [["train.micro_batches=2"], ["model.remat=full", "model.mlp_tile=8"]])
def test_a_run_may_go_on_in_less_memory_and_learns_the_same(finished, tmp_path, monkeypatch, changes):
    workdir = shutil.copytree(finished, tmp_path / "run")
    shutil.rmtree(workdir / "checkpoints" / "6")
    compiled = []

    def compile_step(step, settings, mesh):
        compiled.append(settings)
        return train_step.compile_step(step, settings, mesh)

    monkeypatch.setattr(train_module, "compile_step", compile_step)
    changed = with_overrides(*changes)
    assert train(changed, workdir)
    assert all((s.model, s.micro_batches) == (changed.model, changed.train.micro_batches) for s in compiled)
    for name, value in load_params(finished)[1].items():
        np.testing.assert_allclose(load_params(workdir)[1][name], value, atol=1e-4, err_msg=name)


def test_means_of_a_whole_model_may_be_given_up_and_those_that_nothing_overrides_stay():
    tiled = dataclasses.replace(EXPERIMENT.model, mlp_tile=8, remat="full")
    assert by_means_of(EXPERIMENT.model, tiled) == EXPERIMENT.model
    assert by_means_of(None, tiled) == by_means_of(ModelOverrides(), tiled) == tiled
    assert by_means_of(ModelOverrides(remat="none"), tiled) == dataclasses.replace(tiled, remat="none")


def test_a_finished_run_says_so_and_does_nothing(finished, capsys):
    before = sorted((path, path.stat().st_mtime_ns) for path in finished.rglob("*"))
    train(EXPERIMENT, finished)
    assert "tiny: finished, all 6 steps" in capsys.readouterr().out
    assert sorted((path, path.stat().st_mtime_ns) for path in finished.rglob("*")) == before


def test_a_model_is_asked_for_however_the_training_is_called(tmp_path):
    """By the command or by a program of one's own."""
    assert "name a model to start from as model.path=DIR" in message_of(train, with_overrides("model=none"), tmp_path)


def test_another_experiment_is_refused_by_the_names_of_its_fields(finished):
    other = with_overrides(
        "optimizer.learning_rate=0.5",
        "train.seed=1",
        "train.log_every=3",
        "evaluation.seed=5",
        "data.on_bad_record=skip",
    )
    message = message_of(train, other, finished)
    assert "optimizer.learning_rate: 0.001 -> 0.5" in message and "train.seed: 0 -> 1" in message
    assert "log_every" not in message and "evaluation" not in message and "on_bad_record" not in message


def test_what_a_resumed_run_may_change_is_noted_whole_or_not_at_all(finished, tmp_path):
    workdir = shutil.copytree(finished, tmp_path / "run")
    changed = with_overrides("data.on_bad_record=skip", "train.log_every=3")
    assert train(changed, workdir) and Experiment.load(workdir) == changed
    before = (workdir / "experiment.json").read_bytes()
    with pytest.raises(UserError, match=r"experiment.json: cannot be written \(file too large\)"), full_disk():
        note_experiment(EXPERIMENT, workdir)
    assert (workdir / "experiment.json").read_bytes() == before


def test_adaptation_starts_from_the_parameters_of_the_step_and_the_tokenizer_of_init_from(finished, tmp_path, capsys):
    experiment = with_overrides(
        f"init_from={finished}@4", "model=none", "train.steps=2", "train.checkpoint_every=1", "optimizer.warmup_steps=1",
        "objective.ar_steps=1",
    )  # fmt: skip
    train(experiment, tmp_path / "run")
    _, base = load_params(finished, step=4)
    config, adapted = load_params(tmp_path / "run", step=1)  # the learning rate of the first update is 0
    assert config == EXPERIMENT.model
    for name, value in base.items():
        np.testing.assert_array_equal(adapted[name], value)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "run" / "tokenizer" / file).read_bytes() == (finished / "tokenizer" / file).read_bytes()
    assert f"from {finished}@4 (step 4 of 6)" in capsys.readouterr().out
    # The AR steps come first, and only the steps after them know of masks.
    assert ["mlm_loss" in line for line in read_metrics(tmp_path / "run")] == [False, True]


def test_the_folder_of_init_from_may_be_in_the_home_directory(finished, monkeypatch):
    """`model.path=~/run`: a shell leaves the tilde as it is behind an equals sign."""
    monkeypatch.setenv("HOME", str(finished.parent))
    here = f"~/{finished.name}"
    assert locate(here) == finished and progress_of(here) == progress_of(str(finished)) != ""
    assert len(load_tokenizer(f"{here}/tokenizer")) == len(load_tokenizer(finished / "tokenizer"))


def test_too_many_updates_that_are_not_finite_stop_the_run(tmp_path):
    """The checkpoints of the bad steps do not displace the last one before them."""
    experiment = with_overrides(
        "optimizer.learning_rate=1e30", "train.max_skipped_in_row=3", "train.checkpoint_every=1",
        "train.keep_checkpoints=1", "objective.ar_steps=6",
    )  # fmt: skip
    message = message_of(train, experiment, tmp_path)
    assert "loss or gradient was not finite 3 times in a row" in message and "optimizer.learning_rate" in message
    lines = read_metrics(tmp_path)
    assert [line["skipped_in_row"] for line in lines] == [0, 1, 2, 3]
    assert [None in (line["loss"], line["grad_norm"]) for line in lines] == [False, True, True, True]
    assert saved_steps(tmp_path) == [1, 3]
    assert all(np.isfinite(value).all() for value in load_params(tmp_path, 1)[1].values())


@pytest.mark.parametrize(
    ("assignments", "message"),
    [
        ("data.source=chat data.path=absent", "absent: no such file or folder; set data.path"),
        ("data.source=chat data.path=.", "the folder holds no file that ends in .jsonl"),
        ("data.source=tokens data.path=.", "the folder holds no file that ends in .npy"),
        ("data.source=hf_dataset data.path=absent", "needs the package datasets: pip install datasets"),
        ("data.num_groups=4", "a batch of 2 rows cannot be split into data.num_groups=4 groups"),
        ("tokenizer.path=absent", "absent is not a directory; name one that holds a tokenizer.json"),
    ],
)  # fmt: skip
def test_what_needs_no_model_is_told_before_one_is_fetched(assignments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.setattr(train_module, "load_initial", lambda *args: pytest.fail("a model is fetched"))
    experiment = with_overrides("init_from=owner/large", "model=none", *assignments.split())
    assert message in message_of(train, experiment, tmp_path / "run")


def test_a_stop_names_checkpoints_only_where_there_are_some():
    """By `model.path=WORKDIR` nothing would be found else; the same workdir may then be used again."""
    numbers, config = {"skipped_in_row": 3}, dataclasses.replace(EXPERIMENT.train, max_skipped_in_row=3)
    with pytest.raises(UserError, match=r"learning_rate in another --workdir, where model.path=WORKDIR goes on"):
        stop_if_not_finite(numbers, config, saved=2)
    with pytest.raises(UserError, match=r"was applied; look at the data, or lower optimizer.learning_rate$"):
        stop_if_not_finite(numbers, config, saved=0)


def test_a_run_is_watched(tmp_path, capsys):
    """Held-out losses in the line of their step, completions with tokens per forward, a trace, event files."""
    workdir = tmp_path / "run"
    experiment = with_overrides(
        "train.eval_every=3", "train.eval_batches=2", "train.eval_samples=1", "train.profile_steps=2",
        "train.tensorboard=true", "evaluation.max_new_tokens=8", "evaluation.window_size=4",
        "train.checkpoint_every=3", "train.keep_checkpoints=1", "train.best_metric=validation_ar_loss",
    )  # fmt: skip
    assert train(experiment, workdir)
    lines = read_metrics(workdir)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    measured = [[name for name in line if name.startswith("validation_")] for line in lines]
    assert [bool(names) for names in measured] == [False, False, True, False, False, True]
    names = {"ar_loss", "mlm_loss", "mlm_loss_0.25", "mlm_loss_0.50", "mlm_loss_0.75", "mlm_loss_1.00"}
    assert {name.removeprefix("validation_") for name in measured[2]} == names <= lines[0].keys()
    best = min((3, 6), key=lambda step: lines[step - 1]["validation_ar_loss"])
    assert saved_steps(workdir) == sorted({best, 6})

    samples = [json.loads(line) for line in (workdir / "samples.jsonl").read_text().splitlines()]
    assert [sample["step"] for sample in samples] == [3, 6]
    assert samples[0]["prompt"] == samples[1]["prompt"] and samples[0]["prompt"].startswith("Q:")
    assert samples[0]["tokens_per_forward"] > 0 and samples[0]["decoder"] == "verified"
    shown = capsys.readouterr().out
    assert "step 3, held out: ar_loss " in shown and "tokens per forward]" in shown

    assert [path.name for path in (workdir / "profile").iterdir()] == ["step_2"]
    assert list((workdir / "profile").rglob("*.xplane.pb"))
    assert list((workdir / "tensorboard").iterdir())


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_run_that_is_told_to_end_saves_before_it_measures_or_decodes_any_more(tmp_path, monkeypatch, when):
    """What ends it may not wait for that."""
    told, looked = [], []

    class Watched:
        def __init__(self, *_, **__):
            pass

        def measure(self, params, *, masks):
            looked.append("losses")
            told.append(when == "meanwhile")
            return {"validation_ar_loss": 1.0}

        def samples(self, params, *, masks):
            looked.append("samples")
            return []

    monkeypatch.setattr(train_module, "Validation", Watched)
    monkeypatch.setattr(
        Termination, "asked", lambda _, step, at_once=False: step == 3 and (when == "before" or told == [True])
    )
    experiment = with_overrides("train.eval_every=3", "train.checkpoint_every=5")
    assert not train(experiment, tmp_path)
    assert saved_steps(tmp_path) == [3] and read_metrics(tmp_path)[-1]["step"] == 3
    assert looked == ([] if when == "before" else ["losses"])


def test_every_number_that_a_run_writes_is_explained(finished):
    page = (Path(__file__).parents[1] / "docs" / "experiments.md").read_text()
    table = page.partition("## What a run writes")[2].partition("\n## ")[0]
    names = {re.sub(r"_\d\.\d\d$", "", name) for line in read_metrics(finished) for name in line}
    assert {"mlm_loss", "grad_norm", "padding_share"} <= names
    assert sorted(name for name in names if f"`{name}`" not in table) == []


def test_watching_changes_nothing_that_is_learned(finished, tmp_path):
    train(with_overrides("train.eval_every=2", "train.eval_batches=2", "train.eval_samples=0"), tmp_path)
    for name, value in load_params(finished)[1].items():
        np.testing.assert_array_equal(load_params(tmp_path)[1][name], value)
    kept = [{k: v for k, v in line.items() if not k.startswith("validation_")} for line in lines_without_time(tmp_path)]
    assert kept == lines_without_time(finished)


def test_held_out_data_that_is_asked_for_and_not_there_is_told(tmp_path):
    (tmp_path / "text.txt").write_text("Tom has three apples. " * 40)
    experiment = with_overrides(
        "data.source=text", f"data.path={tmp_path / 'text.txt'}", "data.held_out_share=0", "train.eval_every=2"
    )
    message = message_of(train, experiment, tmp_path / "run")
    assert message.startswith("train.eval_every asks for held-out data: ")
    assert message.endswith("raise data.held_out_share, or measure nothing with train.eval_every=0")


def test_a_device_with_too_little_memory_is_told_in_a_line_that_says_what_to_lower(tmp_path, monkeypatch):
    def refused(state, batch):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.\nBuffers:\n")

    monkeypatch.setattr(train_module, "compile_step", lambda step, settings, mesh: refused)
    message = message_of(train, EXPERIMENT, tmp_path)
    assert "a device has too little memory (RESOURCE_EXHAUSTED: Out of memory" in message
    assert "raise train.micro_batches, set model.remat=full" in message


def test_a_tokenizer_that_training_cannot_use_either_is_no_matter_of_held_out_data(tmp_path):
    tokenizer = train_tokenizer(["Tom has three apples."], 300)
    tokenizer.chat_template = None
    save_tokenizer(tokenizer, tmp_path / "tokenizer")
    for steps in (0, 2):
        experiment = with_overrides(
            "data.source=chat", f"data.path={chat_file(tmp_path)}", f"tokenizer.path={tmp_path / 'tokenizer'}",
            "data.held_out_share=0.5", f"train.eval_every={steps}",
        )  # fmt: skip
        message = message_of(train, experiment, tmp_path / f"run {steps}")
        assert message.startswith("the tokenizer has no chat template") and "train.eval_every" not in message


def test_the_model_of_init_from_may_be_computed_otherwise(finished, tmp_path):
    experiment = with_overrides(
        "model=none", f"model.path={finished}", "model.remat=full", "model.matmul_precision=highest", "train.steps=1"
    )
    train(experiment, tmp_path)
    assert ModelFile.read(tmp_path).init_from == f"{finished}@6"  # the newest, which it is now
    config = load(tmp_path).config
    assert (config.remat, config.matmul_precision, config.hidden_size) == (
        "full",
        "highest",
        EXPERIMENT.model.hidden_size,
    )


def command(monkeypatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["train", *arguments])
    main()


def test_the_command_prints_the_experiment_with_its_overrides(monkeypatch, capsys):
    command(monkeypatch, "--exp", "quickstart", "--print-config", "train.steps=3", "name=other")
    printed = json.loads(capsys.readouterr().out)
    assert (printed["train"]["steps"], printed["name"]) == (3, "other")


@pytest.mark.parametrize("flag", [["--print-config"], ["--compile-only", "v5p:2x2x1"]])
def test_what_is_asked_of_one_experiment_trains_no_study(monkeypatch, capsys, flag):
    monkeypatch.setattr(train_module, "run_study", lambda *_: pytest.fail("trained"))
    with pytest.raises(SystemExit) as ended:
        command(monkeypatch, "--exp", "ablations", *flag)
    said = f"error: {flag[0]} is for one experiment; the study ablations trains quickstart_base, "
    assert ended.value.code == 2 and capsys.readouterr().err.startswith(said)


@pytest.mark.parametrize("overrides", [[], ["train.steps=3"]])
def test_an_experiment_that_has_no_model_yet_is_printed_too(monkeypatch, capsys, overrides):
    command(monkeypatch, "--exp", "sft", "--print-config", *overrides)
    printed = json.loads(capsys.readouterr().out)
    assert (printed["name"], printed["init_from"]) == ("sft", None)


def test_the_command_lists_the_experiments(monkeypatch, capsys):
    command(monkeypatch, "--list")
    assert "quickstart_base" in capsys.readouterr().out


def test_the_command_prints_the_version(monkeypatch, capsys):
    from wedlm_jax.version import __version__

    command(monkeypatch, "--version")
    assert capsys.readouterr().out.strip() == f"wedlm_jax {__version__}"


def test_decoding_stops_where_the_training_data_end_a_turn(tmp_path):
    """The end token of the data joins the end ids that the workdir's model carries."""
    experiment = override(EXPERIMENT, "data.end_token=<|endoftext|>", "train.steps=1", "train.checkpoint_every=1")
    train(experiment, tmp_path)
    model = load(tmp_path)
    assert model.tokenizer is not None
    ends = [model.tokenizer.eos_token_id, model.tokenizer.convert_tokens_to_ids("<|endoftext|>")]
    assert model.eos_token_ids == tuple(dict.fromkeys(ends))


def test_prompts_of_a_trained_model_and_of_its_export_are_written_as_in_training(tmp_path):
    """`data.chat_template_kwargs` is in the template that both carry, wherever the base had it."""
    base = dataclasses.replace(tiny_model(), tokenizer=copy.deepcopy(tiny_model().tokenizer))
    base.tokenizer.chat_template += "{{ mood }}"
    in_config, in_file = tmp_path / "in_config", tmp_path / "in_file"
    save(base, in_config, "qwen3")
    shutil.copytree(in_config, in_file)
    config = json.loads((in_file / "tokenizer_config.json").read_text())
    (in_file / "chat_template.jinja").write_text(config.pop("chat_template"))
    (in_file / "tokenizer_config.json").write_text(json.dumps(config))
    message = [{"role": "user", "content": "Tom?"}]
    for folder in (in_config, in_file):
        experiment = with_overrides(
            f"init_from={folder}", "model=none", "train.steps=1", 'data.chat_template_kwargs={"mood": "glad"}'
        )
        workdir = tmp_path / f"{folder.name}_run"
        train(experiment, workdir)
        save(load(workdir), tmp_path / f"{folder.name}_out", "qwen3")
        for place in (workdir, tmp_path / f"{folder.name}_out"):
            assert render_messages(load(place), message).endswith("<|im_start|>assistant\nglad")
            other = load(place, chat_template_kwargs={"mood": "sad"})
            assert render_messages(other, message).endswith("<|im_start|>assistant\nsad")
    assert "reads no 'moody'" in message_of(
        train, override(experiment, 'data.chat_template_kwargs={"moody": 1}'), tmp_path / "other"
    )


def test_a_workdir_that_is_used_again_keeps_no_file_of_another_tokenizer(finished, tmp_path):
    """Of a start that came to no checkpoint; files of the user stay."""
    folder = tmp_path / "run" / "tokenizer"
    folder.mkdir(parents=True)
    for name in ("chat_template.jinja", "generation_config.json", "vocab.json", "notes.txt"):
        (folder / name).write_text("{}")
    for experiment in (EXPERIMENT, with_overrides(f"init_from={finished}", "model=none")):
        initial = load(finished, "float32") if experiment.init_from else None
        (folder / "chat_template.jinja").write_text("of another model")
        prepare_workdir(experiment, initial, EXPERIMENT.model, tmp_path / "run")
        assert sorted(path.name for path in folder.iterdir()) == [
            "notes.txt",
            "tokenizer.json",
            "tokenizer_config.json",
        ]


def test_the_end_that_is_learned_joins_those_of_the_base_and_how_it_samples_reaches_the_export(finished, tmp_path):
    """A base whose configs name another end than its tokenizer, as Qwen3's do."""
    base = load(finished)
    save(dataclasses.replace(base, eos_token_ids=(9,)), tmp_path / "base", "qwen3")
    (tmp_path / "base" / "generation_config.json").write_text('{"eos_token_id": 9, "do_sample": true, "top_k": 20}')
    experiment = with_overrides(
        f"init_from={tmp_path / 'base'}", "model=none", "train.steps=1", "train.checkpoint_every=1"
    )
    train(experiment, tmp_path / "run")
    model = load(tmp_path / "run")
    ends = [9, base.tokenizer.eos_token_id]
    assert list(model.eos_token_ids) == ends
    save(model, tmp_path / "out", "qwen3")
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    pad = base.tokenizer.pad_token_id
    assert generation == {"eos_token_id": ends, "do_sample": True, "top_k": 20, "pad_token_id": pad}
