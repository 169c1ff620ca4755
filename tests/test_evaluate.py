"""`python -m wedlm_jax.evaluate`: from two trained workdirs to table, JSON, plot and one coloured decode."""

import dataclasses
import io
import json
import re
import shutil
from pathlib import Path

import jax
import pytest
from rich.console import Console
from scipy.stats import binomtest

from tests.bad_input import full_disk
from tests.evals.models import tiny_model
from tests.one_line import complaint_of
from wedlm_jax import evaluate as command
from wedlm_jax.checkpoint import Checkpoints
from wedlm_jax.data.quickstart_tasks import Problem
from wedlm_jax.decode.calibration import Calibration, write_calibration
from wedlm_jax.decode.config import DecodeConfig
from wedlm_jax.decode.generation import generate
from wedlm_jax.decode.stats import Completion, Stats
from wedlm_jax.errors import UserError
from wedlm_jax.evals.config import EvaluationConfig
from wedlm_jax.evals.likelihood import recovery_by_ratio
from wedlm_jax.evals.sweep import Setting, settings_of
from wedlm_jax.evals.tasks import Task
from wedlm_jax.experiment import Experiment, load_experiment
from wedlm_jax.model.parameters import init_params, params_of
from wedlm_jax.optimizer import OptimizerConfig
from wedlm_jax.pretrained import load, save
from wedlm_jax.results import digest_of_file
from wedlm_jax.sharding import MeshConfig
from wedlm_jax.train import train
from wedlm_jax.train_state import new_state

EXPERIMENTS = """
from dataclasses import replace

from wedlm_jax.experiment import *

SHAPE = ModelConfig(
    vocab_size=512, hidden_size=16, intermediate_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8,
    max_position_embeddings=512, tie_word_embeddings=True,
)


def base():
    return Experiment(
        "base", SHAPE, data=DataConfig(row_length=128, num_problems=100), objective=ObjectiveConfig(block_size=8, ar_steps=2),
        train=TrainConfig(steps=2, batch_size=8, checkpoint_every=1),
    )


def adapted():
    evaluation = EvaluationConfig(
        tasks=("word_problems", "counting"), problems_per_task=3, max_new_tokens=8, window_size=4, block_size=4
    )
    return replace(base(), name="adapted", model=None, init_from="{folder}/base", evaluation=evaluation,
                   objective=ObjectiveConfig(block_size=8))


def code():
    evaluation = EvaluationConfig(
        tasks=(), text_prompts=2, text_prompt_characters=40, held_out_files=2, masked_loss_rows=9, max_new_tokens=8,
        window_size=4, block_size=8,
    )
    return Experiment(
        "code", SHAPE, data=DataConfig(source="stdlib_code", path="{folder}/library", row_length=64),
        objective=ObjectiveConfig(block_size=8), train=TrainConfig(steps=2, batch_size=8), evaluation=evaluation,
    )


def chats():
    data = DataConfig(source="chat", path="{folder}/chat.jsonl", row_length=128, num_groups=16, held_out_share=0.5)
    return replace(code(), name="chats", model=None, init_from="{folder}/base", data=data,
                   train=TrainConfig(steps=2, batch_size=16))
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """An experiment file whose experiments are trained in the folder beside it."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "library").mkdir()
    for i in range(120):  # a twentieth is held out
        (folder / "library" / f"m{i}.py").write_text(
            "".join(f"def f{j}(x):\n    return x + {i * j}\n" for j in range(12))
        )
    turns = [[{"role": "user", "content": f"Say {i}"}, {"role": "assistant", "content": "No"}] for i in range(40)]
    (folder / "chat.jsonl").write_text("".join(json.dumps({"messages": of}) + "\n" for of in turns))
    file = folder / "small.py"
    file.write_text(EXPERIMENTS.replace("{folder}", str(folder)))
    for name in ("base", "adapted", "code", "chats"):
        train(load_experiment(f"{file}:{name}"), folder / name)
    return file


@pytest.fixture
def call(monkeypatch, capsys):
    def run(*flags):
        monkeypatch.setattr("sys.argv", ["evaluate", *map(str, flags)])
        command.main()
        return capsys.readouterr().out

    return run


@pytest.fixture
def refused(monkeypatch, capsys):
    def run(*flags):
        monkeypatch.setattr("sys.argv", ["evaluate", *map(str, flags)])
        return complaint_of(capsys, command.main)

    return run


def test_an_adaptation_gets_one_table_saved_and_plotted(file, call):
    folder = file.parent / "adapted"
    shown = call("--exp", f"{file}:adapted", "--workdir", folder)
    results = json.loads((folder / "evaluation" / "results.json").read_text())
    rows = results["rows"]
    assert results["evaluation"] == Experiment.load(folder).to_dict()["evaluation"]
    assert [row["task"] for row in rows] == ["word_problems"] * 8 + ["counting"] * 8
    assert [row["label"] for row in rows[:8]] == [
        "AR, base", "AR, adapted", "block-wise, J=4", "streaming, tau=0.1", "streaming, tau=0.4", "streaming, tau=1",
        "lookup", "verified",
    ]  # fmt: skip
    for row in rows:
        assert row["n"] == 3 and (row["low"], row["high"]) == binomtest(row["correct"], 3).proportion_ci(
            method="wilson"
        )
        assert row["label"] not in ("verified", "lookup") or row["equal_to_ar"] == 3
        assert not row["label"].startswith("streaming") or row["p_cache"] <= 0.5
        assert f"{row['tokens_per_forward']:.2f}" in shown
    assert "stays at or below 0.5" in " ".join(shown.split())
    assert "one decode, verified" in shown and "forward:" in shown
    assert (folder / "evaluation" / "results.png").read_bytes().startswith(b"\x89PNG")


def test_base_and_adapted_rows_come_from_their_own_weights(file):
    plan = command.plan_experiment(command.Evaluate(workdir=file.parent / "adapted"), f"{file}:adapted")
    base, adapted = (plan.models[name].transformer.embed.embedding[...] for name in ("base", "adapted"))
    assert (base != adapted).any()
    assert all(m.config.dtype == "float32" and m.config.matmul_precision == "highest" for m in plan.models.values())


def test_the_base_is_the_step_that_was_started_from_also_when_the_base_has_trained_on(file, tmp_path, capsys):
    for name in ("base", "adapted"):
        shutil.copytree(file.parent / name, tmp_path / name)
    for name in ("experiment.json", "model.json"):
        saved = tmp_path / "adapted" / name
        saved.write_text(saved.read_text().replace(str(file.parent), str(tmp_path)))

    def plan():
        return command.plan_experiment(command.Evaluate(workdir=tmp_path / "adapted"), f"{file}:adapted")

    def embedding(model):
        return model.transformer.embed.embedding[...]

    before = load(f"{tmp_path / 'base'}@2")
    with Checkpoints(tmp_path / "base", keep=2) as checkpoints:
        checkpoints.save(new_state(init_params(before.config, 7), OptimizerConfig()), 3, {}, {})
    assert (embedding(load(tmp_path / "base")) != embedding(before)).any()
    assert (embedding(plan().models["base"]) == embedding(before)).all() and capsys.readouterr().err == ""

    shutil.rmtree(tmp_path / "base" / "checkpoints" / "2")
    found = plan()
    assert found.models.keys() == {"adapted"} == {setting.weights for setting in found.settings}
    assert capsys.readouterr().err.startswith(f"note: {tmp_path}/base@2, where it started, is gone; ")


def test_another_step_of_an_experiment_is_evaluated_by_name_in_a_folder_of_its_own(file):
    workdir = file.parent / "adapted"
    step = command.plan_experiment(command.Evaluate(workdir=file.parent / "adapted@1"), f"{file}:adapted")
    newest = command.plan_experiment(command.Evaluate(workdir=workdir), f"{file}:adapted")
    first, last = (plan.models["adapted"].transformer.embed.embedding[...] for plan in (step, newest))
    assert (first != last).any() and (first == load(f"{workdir}@1").transformer.embed.embedding[...]).all()
    assert (step.title, newest.title) == ("adapted@1", "adapted")
    assert (step.out, newest.out) == (workdir / "evaluation@1", workdir / "evaluation")
    assert [command.as_results(plan, [])["step"] for plan in (step, newest)] == [1, 2]
    asked = dataclasses.replace(newest, config=dataclasses.replace(newest.config, questions=str(file)))
    assert command.as_results(asked, [])["questions_sha256"] == digest_of_file(file)
    part = command.plan_experiment(command.Evaluate(workdir=workdir, task="counting", limit=2), f"{file}:adapted")
    assert part.out == workdir / "evaluation-counting-2"  # what a study reads is the whole one


def test_fields_of_the_evaluation_can_be_set_and_a_difference_to_those_of_the_training_is_told(file, refused, capsys):
    workdir, name = file.parent / "adapted", f"{file}:adapted"
    command.plan_experiment(command.Evaluate(workdir=workdir), name)
    assert "note" not in capsys.readouterr().err
    changed = command.Evaluate(
        workdir=workdir, overrides=("evaluation.problems_per_task=1", "evaluation.tasks=copying")
    )
    plan = command.plan_experiment(changed, name)
    assert [(task.name, len(problems)) for task, problems in plan.tasks] == [("copying", 1)]
    assert plan.out == workdir / "evaluation-problems_per_task=1-tasks=copying"
    said = "note: not as the training was told (evaluation: problems_per_task: 3 -> 1; tasks: "
    assert capsys.readouterr().err.startswith(said)
    assert "only evaluation.field=value" in refused("--exp", name, "--workdir", workdir, "train.steps=3")
    assert "goes with --exp" in refused("--model", workdir, "--task", "counting", "evaluation.seed=1")


def test_the_best_step_of_an_experiment_is_evaluated_by_its_number(file, tmp_path):
    workdir = shutil.copytree(file.parent / "base", tmp_path / "base")
    model, best_metric = load(workdir), "validation_ar_loss"
    with Checkpoints(workdir, keep=1, best_metric=best_metric) as checkpoints:
        for step, loss in ((3, 1.0), (4, 2.0)):
            checkpoints.save(new_state(params_of(model.transformer), OptimizerConfig()), step, {}, {best_metric: loss})
    plan = command.plan_experiment(command.Evaluate(workdir=tmp_path / "base@best"), f"{file}:base")
    assert (plan.title, plan.out) == ("base@3", workdir / "evaluation@3")


def test_text_gets_bits_per_byte_masked_loss_and_continuations_side_by_side(file, call, tmp_path):
    shown = call("--exp", f"{file}:code", "--workdir", file.parent / "code", "--out", tmp_path / "out")
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    bits = results["bits_per_byte"]["adapted"]
    assert bits["bits_per_byte"] == bits["bits"] / bits["bytes"] and f"{bits['bits_per_byte']:.3f}" in shown
    by_ratio = results["masked_loss_by_ratio"]
    assert set(by_ratio) == {"0.1", "0.3", "0.5", "0.7", "0.9"}
    assert results["masked_loss"] == pytest.approx(sum(by_ratio.values()) / 5)
    assert 0 <= results["masked_accuracy"] <= 1 and "masked_loss_in_place" not in results
    assert [set(c) for c in results["continuations"]] == [{"prompt", *(row["label"] for row in results["rows"])}] * 2
    assert all(row["accuracy"] is None and row["n"] == 2 for row in results["rows"])
    assert "held-out prompt 2" in shown
    assert not (tmp_path / "out" / "results.png").exists()  # nothing was scored


@pytest.mark.parametrize("measure", ["evaluate_text", "evaluate_masks"])
def test_what_needs_no_decoding_is_measured_before_a_prompt_is_decoded(file, refused, monkeypatch, tmp_path, measure):
    """Its error ended an evaluation that had decoded for hours."""

    def fails(*_):
        raise UserError("no token is masked")

    monkeypatch.setattr(command, measure, fails)
    monkeypatch.setattr(command, "sweep", lambda *_, **__: pytest.fail("a prompt was decoded"))
    flags = ("--exp", f"{file}:code", "--workdir", file.parent / "code", "--out", tmp_path)
    assert "no token is masked" in refused(*flags)


def test_masks_are_recovered_in_as_many_held_out_rows_as_are_asked_for(file, call, tmp_path, monkeypatch):
    measured = []

    def recovery(model, batches, **how):
        measured.extend(len(batch.tokens) for batch in batches)
        return recovery_by_ratio(model, batches, **how)

    monkeypatch.setattr(command, "recovery_by_ratio", recovery)
    call("--exp", f"{file}:code", "--workdir", file.parent / "code", "--out", tmp_path)
    assert sum(measured) == 9


def test_chats_are_continued_behind_their_held_out_prompts_and_their_rows_measured_in_one_group(file, call, tmp_path):
    shown = call("--exp", f"{file}:chats", "--workdir", file.parent / "chats", "--out", tmp_path)
    results = json.loads((tmp_path / "results.json").read_text())
    prompts = [of["prompt"] for of in results["continuations"]]
    assert len(set(prompts)) == 2 and all(re.search(r"user\nSay \d+<\|im_end\|>\n.*assistant\n$", p) for p in prompts)
    assert results["masked_loss"] > 0  # in batches of 8, though training's 16 rows are of 16 groups
    assert "bits_per_byte" not in results and "bits per byte: left out, data.source=chat has no files of code" in shown


def test_a_bad_held_out_record_is_left_out_once_training_was_told_so(file, refused, tmp_path):
    """Also where that is finished: it reads none of these, and may never have met one."""
    workdir, data, saved = tmp_path / "chats", tmp_path / "chat.jsonl", tmp_path / "chats" / "experiment.json"
    shutil.copytree(file.parent / "chats", workdir)
    saved.write_text(saved.read_text().replace(str(file.parent / "chat.jsonl"), str(data)))
    bad = (f'{{"messages": {number}}}\n' for number in range(100))
    data.write_text((file.parent / "chat.jsonl").read_text() + "".join(bad))
    message = refused("--exp", f"{file}:chats", "--workdir", workdir)
    assert re.search(
        r"chat.jsonl:\d+: .*data.on_bad_record=skip .*: give that setting to its python -m wedlm_jax.train", message
    )
    train(load_experiment(f"{file}:chats", [f"data.path={data}", "data.on_bad_record=skip"]), workdir)
    plan = command.plan_experiment(command.Evaluate(workdir=workdir), f"{file}:chats")
    assert [len(problems) for _, problems in plan.tasks] == [2]


def test_continuations_are_shown_at_the_middle_threshold_with_masks_reordered():
    settings = settings_of(EvaluationConfig(in_place=True), with_base=False)
    completions = {("t", s.label): [Completion([], "stop", Stats(0, 0, 0), s.label)] for s in settings}
    console = Console(file=io.StringIO(), width=120)
    task = Task("t", lambda limit, seed: [], None)
    command.show_continuations(settings, task, [Problem("t", "Q", "", "")], completions, console)
    shown = console.file.getvalue()
    assert "streaming, tau=0.4" in shown and "in place" not in shown and "tau=1" not in shown


def plan_of(tmp_path, *tasks):
    """AR of a tiny model on `tasks`, two problems each."""
    settings = [Setting("AR", "adapted", DecodeConfig(decoder="ar", max_new_tokens=4))]
    problems = [(of, command.task("counting").problems(2, 0)) for of in tasks]
    return command.Plan("x", {"adapted": tiny_model()}, settings, problems, EvaluationConfig(), None, tmp_path)


def test_an_interrupted_evaluation_leaves_the_tasks_that_were_done_and_no_whole_results(tmp_path):
    def interrupted(problem, text):
        raise KeyboardInterrupt

    def never_right(problem, text):
        return False

    first, second = (Task(score.__name__, lambda limit, seed: [], score) for score in (never_right, interrupted))
    with pytest.raises(KeyboardInterrupt):
        command.evaluate(plan_of(tmp_path, first, second), Console(quiet=True))
    rows = json.loads((tmp_path / "unfinished.json").read_text())["rows"]
    assert [row["task"] for row in rows] == ["never_right"] and not (tmp_path / "results.json").exists()
    command.evaluate(plan_of(tmp_path, first), Console(quiet=True))
    assert {path.name for path in tmp_path.iterdir()} == {"results.json", "results.png", "completions.jsonl"}


def test_every_completion_is_a_line_as_soon_as_it_is_there(tmp_path):
    plan = plan_of(tmp_path, command.task("counting"))
    command.evaluate(plan, Console(quiet=True))
    lines = [json.loads(line) for line in (tmp_path / "completions.jsonl").read_text().splitlines()]
    problems = plan.tasks[0][1]
    said = [
        completion.text for completion in generate(tiny_model(), [p.prompt for p in problems], plan.settings[0].config)
    ]
    assert [(line["prompt"], line["answer"], line["completion"]) for line in lines] == [
        (p.prompt, p.answer, text) for p, text in zip(problems, said, strict=True)
    ]
    assert {(line["task"], line["decoder"], line["right"]) for line in lines} == {("counting", "AR", False)}

    def interrupted(problem, text):
        if problem == problems[1]:
            raise KeyboardInterrupt
        return True

    with pytest.raises(KeyboardInterrupt):
        command.evaluate(plan_of(tmp_path, Task("t", lambda limit, seed: [], interrupted)), Console(quiet=True))
    (line,) = (tmp_path / "completions.jsonl").read_text().splitlines()
    assert json.loads(line)["right"]


def test_results_are_written_before_one_decode_is_shown(tmp_path, monkeypatch):
    def fails(*_):
        raise RuntimeError

    monkeypatch.setattr(command, "show_one_decode", fails)
    with pytest.raises(RuntimeError):
        command.evaluate(plan_of(tmp_path, command.task("counting")), Console(quiet=True))
    assert (tmp_path / "results.json").is_file()


def test_a_decode_that_a_stop_string_cuts_short_is_shown(call, tmp_path):
    save(tiny_model(), tmp_path / "model")
    flags = ("--model", tmp_path / "model", "--task", "counting", "--limit", 1, "--max-new-tokens", 12)
    streaming = ("--decoder", "streaming", "--window-size", 8, "--entropy-threshold", "inf")  # emits runs of tokens
    call(*flags, *streaming, "--out", tmp_path / "out")
    prompt = command.task("counting").problems(1, 0)[0].prompt
    config = DecodeConfig(max_new_tokens=12, window_size=8, entropy_threshold=float("inf"))
    (whole,) = generate(tiny_model(), [prompt], config)
    stop = whole.text[len(whole.text) // 2]
    assert "one decode, streaming" in call(*flags, *streaming, "--stop", stop)


def test_a_calibration_that_is_decoded_by_is_told_once_and_stands_in_the_json(monkeypatch, capsys, tmp_path):
    save(tiny_model(), tmp_path / "model")
    found = Calibration(0.25, 0.5, 16, 0.01, 0.005, 1000, 2.0)
    write_calibration(tmp_path / "model", found, tiny_model())
    flags = ["--model", tmp_path / "model", "--task", "counting", "--limit", 1, "--max-new-tokens", 4]
    flags += ["--out", tmp_path]

    def told(*further):
        monkeypatch.setattr("sys.argv", ["evaluate", *map(str, [*flags, *further])])
        command.main()
        return capsys.readouterr().err

    assert told().count(found.in_words()) == 1
    streaming = json.loads((tmp_path / "results.json").read_text())["rows"][1]["settings"]
    assert (streaming["entropy_threshold"], streaming["distance_penalty"]) == (0.25, 0.5)
    assert "but with lambda 0.7, as given" in told("--distance-penalty", 0.7)
    assert "calibrated" not in told("--entropy-threshold", 0.4) and "calibrated" not in told("--decoder", "verified")


def test_any_model_is_measured_against_its_own_ar(call, tmp_path):
    save(tiny_model(), tmp_path / "model")
    flags = ("--model", tmp_path / "model", "--task", "counting", "--limit", 2, "--max-new-tokens", 8)
    shown = call(*flags, "--decoder", "verified", "--window-size", 4, "--out", tmp_path / "out")
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [row["label"] for row in results["rows"]] == ["AR", "verified"]
    assert results["rows"][1]["settings"]["window_size"] == 4 and results["rows"][1]["equal_to_ar"] == 2
    assert "counting n = 2" in " ".join(shown.split())


def test_rounded_weights_are_measured_against_their_own_ar(call, tmp_path):
    save(tiny_model(), tmp_path / "model")
    flags = ("--model", tmp_path / "model", "--int8", "--task", "counting", "--limit", 2, "--max-new-tokens", 8)
    shown = call(*flags, "--decoder", "verified", "--window-size", 4, "--out", tmp_path / "out")
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["name"] == f"{tmp_path / 'model'} in int8" and "modelinint8" in "".join(shown.split())
    assert results["rows"][1]["equal_to_ar"] == 2


def test_a_model_that_is_rounded_is_loaded_on_the_host(tmp_path, monkeypatch):
    """Exact, it may not fit on the device that holds it rounded."""
    save(tiny_model(), tmp_path / "model")
    load, hosts = command.pretrained.load, []

    def seen(*arguments, **options):
        hosts.append((jax.config.jax_default_device, options["mesh"]))
        return load(*arguments, **options)

    monkeypatch.setattr(command.pretrained, "load", seen)
    args = command.Evaluate(model="x", int8=True, mesh=MeshConfig(data=2))
    model = command.load_as_asked(args, str(tmp_path / "model"))
    assert hosts == [(jax.devices("cpu")[0], MeshConfig(data=1))]
    assert model.config.kernel_dtype == "int8" and model.mesh.size == 2


@pytest.mark.parametrize(("asked", "numbers"), [((), "float32"), (("--dtype", "bfloat16"), "bfloat16")])
def test_a_model_is_measured_in_float32_unless_other_numbers_are_asked_for(asked, numbers, call, tmp_path):
    save(tiny_model(), tmp_path / "model")
    flags = (
        "--model",
        tmp_path / "model",
        "--task",
        "counting",
        "--limit",
        1,
        "--max-new-tokens",
        4,
        "--decoder",
        "ar",
    )
    call(*flags, *asked, "--out", tmp_path / "out")
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["dtype"] == numbers and results["name"].endswith(" in bfloat16" if asked else "model")


def test_questions_of_a_file_are_scored_and_cut_completions_told(call, tmp_path):
    model = tiny_model()
    save(model, tmp_path / "model")
    prompts = [f"Q: {i}? A:" for i in range(3)]
    of_ar = generate(model, prompts, DecodeConfig(decoder="ar", max_new_tokens=8))
    answers = [of_ar[0].text, of_ar[1].text + " and more", of_ar[2].text]
    lines = [json.dumps({"prompt": p, "answer": a}) for p, a in zip(prompts, answers, strict=True)]
    (tmp_path / "mine.jsonl").write_text("\n".join(lines))
    flags = ("--model", tmp_path / "model", "--questions", tmp_path / "mine.jsonl", "--match", "text")
    shown = " ".join(call(*flags, "--max-new-tokens", 8, "--decoder", "lookup", "--out", tmp_path / "out").split())
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert (results["questions"], results["match"]) == (str(tmp_path / "mine.jsonl"), "text")
    assert [(row["task"], row["label"], row["correct"], row["n"]) for row in results["rows"]] == [
        ("mine", "AR", 2, 3), ("mine", "lookup", 2, 3),
    ]  # fmt: skip
    cut = sum(c.finish_reason == "length" for c in of_ar)
    assert cut and f"mine: of 3 completions {cut} (AR) were cut at max_new_tokens=8; raise it" in shown


def test_names_of_files_are_shown_as_they_are(call, tmp_path):
    save(tiny_model(), tmp_path / "model")
    (tmp_path / "[red]x.jsonl").write_text('{"prompt": "Q", "answer": "1"}')
    flags = (
        "--questions",
        tmp_path / "[red]x.jsonl",
        "--max-new-tokens",
        4,
        "--decoder",
        "ar",
        "--out",
        tmp_path / "[o]ut",
    )
    shown = call("--model", tmp_path / "model", *flags)
    assert "[red]x" in shown and "[o]ut/results.json" in shown.replace("\n", "")


def test_a_folder_with_a_long_name_is_named_by_a_digest(file, call):
    (long := file.parent / ("long" * 40)).mkdir()
    (long / "mine.jsonl").write_text('{"prompt": "Q", "answer": "1"}')
    fields = ("evaluation.tasks=", f"evaluation.questions={long / 'mine.jsonl'}")
    shown = call("--exp", f"{file}:adapted", "--workdir", file.parent / "adapted", *fields).replace("\n", "")
    (folder,) = [Path(written).parent for written in re.findall(r"wrote (\S+results.json)", shown)]
    assert folder.is_dir() and re.fullmatch(r"evaluation-[0-9a-f]{16}", folder.name)


def test_an_evaluation_without_tasks_measures_the_rest(file, call, tmp_path):
    flags = ("--exp", f"{file}:code", "--workdir", file.parent / "code", "--out", tmp_path / "out")
    shown = call(*flags, "evaluation.text_prompts=0", "evaluation.held_out_files=0")
    assert "masked-token loss" in shown and "one decode" not in shown and "decoder" not in shown
    assert json.loads((tmp_path / "out" / "results.json").read_text())["rows"] == []


def test_an_untrained_experiment_says_which_command_makes_it(file, refused, tmp_path):
    message = refused("--exp", f"{file}:adapted", "--workdir", tmp_path / "none")
    assert f"python -m wedlm_jax.train --exp {file}:adapted --workdir {tmp_path / 'none'}" in message


@pytest.mark.parametrize(
    "flags, complaint",
    [
        ((), "give one of --exp NAME and --model DIR"),
        (("--exp", "a", "--model", "b"), "give one of --exp NAME and --model DIR"),
        (("--exp", "no_such_experiment"), "unknown experiment no_such_experiment"),
        (("--model", "nowhere", "--task", "counting"), "nowhere"),
        (("--model", "nowhere"), "--model needs one of --task"),
        (("--model", "nowhere", "--task", "counting", "--questions", "q"), "--model needs one of --task"),
        (
            ("--model", "nowhere", "--task", "counting", "--match", "text"),
            "--match does nothing here; use it with --questions",
        ),
        (("--exp", "a", "--batch-size", "8"), "--batch-size does nothing here; use evaluation.batch_size=..."),
        (("--exp", "a", "--questions", "q"), "--questions does nothing here; use evaluation.questions=..."),
        (
            ("--exp", "sft", "evaluation.match=best"),
            "evaluation.match='best': input should be 'number', 'choice', 'formula' or 'text'",
        ),
        (("--model", "nowhere", "--task", "sums"), "task 'sums' does not exist"),
        (("--model", "nowhere", "--task", "counting", "--workdir", "x"), "--workdir goes with --exp"),
        (("--exp", "a", "--decoder", "ar"), "decoder flags go with --model"),
        (("--exp", "a", "--int8"), "--int8 goes with --model DIR"),
        (("--exp", "a", "--dtype", "bfloat16"), "--dtype goes with --model DIR; an experiment has its own"),
        (("--exp", "a", "--limit", "0"), "--limit 0: must be at least 1"),
        (("--exp", "quickstart", "evaluation.seed=-1"), "evaluation.seed=-1: must be at least 0"),
        (("--model", "nowhere", "--task", "counting", "--top-p", "2"), "top_p=2"),
    ],
)
def test_bad_flags_are_one_line(refused, flags, complaint):
    assert complaint in refused(*flags)


def test_what_cannot_be_saved_leaves_the_results_before_it(tmp_path):
    plan = command.Plan("x", {}, [], [], EvaluationConfig(), None, tmp_path)
    command.save(plan, [], {"rows": []}, Console(quiet=True))
    before = (tmp_path / "results.json").read_bytes()
    with pytest.raises(UserError, match=r"results.json: cannot be written \(file too large\)"), full_disk():
        command.save(plan, [], {"rows": [1]}, Console(quiet=True))
    assert (tmp_path / "results.json").read_bytes() == before


def test_results_without_answers_lie_beside_no_picture_of_earlier_answers(tmp_path):
    (tmp_path / "results.png").write_text("of an earlier run")
    plan = command.Plan("x", {}, [], [], EvaluationConfig(), None, tmp_path)
    command.save(plan, [], {"rows": []}, Console(quiet=True))
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]
