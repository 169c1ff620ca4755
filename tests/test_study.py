import dataclasses
import functools
import io
import json
import math
import sys
from pathlib import Path

import matplotlib
import pytest
from matplotlib.axes import Axes
from rich.console import Console

from tests.bad_input import full_disk
from wedlm_jax import checkpoint, train
from wedlm_jax.checkpoint import refuse_unfit_path
from wedlm_jax.errors import UserError
from wedlm_jax.evals.sweep import settings_of
from wedlm_jax.experiment import list_experiments, load_experiment, load_named
from wedlm_jax.results import digest_of_file, write_json
from wedlm_jax.study import Curve, Measure, Stage, Study, run_study
from wedlm_jax.study.design import folder_name
from wedlm_jax.workdir import checked_workdir

BASE = Stage("base")
MEASURES = (Measure("accuracy", "accuracy", task="sums", decoder="AR"), Measure("loss", "loss"))
STUDY = Study(
    name="blocks",
    arms={"J = 8": (BASE, Stage("adapted")), "J = 4": (BASE, Stage("adapted", ("objective.block_size=4",)))},
    measures=MEASURES,
    seeds=(3, 5),
)
QUIET = Console(quiet=True)


class Commands:
    """Stands for the child processes: notes every command, and evaluates to numbers that tell the runs apart."""

    def __init__(self, step=None, **evaluation):
        self.lines: list[str] = []
        self.step = step
        self.evaluation = {"problems_per_task": 2, "entropy_thresholds": [0.4, math.inf], **evaluation}

    @property
    def evaluations(self) -> int:
        return sum(line.startswith("wedlm_jax.evaluate") for line in self.lines)

    def __call__(self, arguments: list[str]) -> None:
        self.lines.append(" ".join(arguments))
        folder = Path(arguments[arguments.index("--workdir") + 1])
        folder.mkdir(parents=True, exist_ok=True)
        if arguments[0] == "wedlm_jax.train":
            (folder / "experiment.json").write_text(json.dumps({"evaluation": self.evaluation}))
        else:
            accuracy = 0.5 if "block_size=4" in folder.name else 1.0
            rows = [
                {"task": "sums", "label": "AR", "accuracy": accuracy, "accepted": [accuracy, accuracy / 2]},
                {"task": "sums", "label": "x", "accuracy": 9},
            ]
            (folder / "evaluation").mkdir(exist_ok=True)
            results = {
                "rows": rows,
                "loss": float(folder.parent.name),
                "evaluation": self.evaluation,
                "step": self.step,
            }
            if questions := self.evaluation.get("questions"):
                results["questions_sha256"] = digest_of_file(Path(questions))
            write_json(folder / "evaluation" / "results.json", results)


def test_every_arm_is_trained_with_every_seed_from_its_own_stage_before(tmp_path):
    commands = Commands()
    run_study(STUDY, tmp_path, commands, QUIET)
    w = f"{tmp_path}/3"
    assert commands.lines[:5] == [
        f"wedlm_jax.train --exp base --workdir {w}/base train.seed=3",
        f"wedlm_jax.train --exp adapted --workdir {w}/base__adapted train.seed=3 init_from={w}/base",
        f"wedlm_jax.evaluate --exp adapted --workdir {w}/base__adapted",
        f"wedlm_jax.train --exp adapted --workdir {w}/base__adapted+objective.block_size=4 objective.block_size=4 "
        f"train.seed=3 init_from={w}/base",
        f"wedlm_jax.evaluate --exp adapted --workdir {w}/base__adapted+objective.block_size=4",
    ]
    assert len(commands.lines) == 10 and "/5/" in commands.lines[5]


def test_how_a_stage_is_evaluated_reaches_its_evaluation(tmp_path):
    commands = Commands()
    stage = Stage("base", ("train.steps=1", "evaluation.limit=7"))
    run_study(dataclasses.replace(STUDY, arms={"a": (stage,)}, seeds=(3,)), tmp_path, commands, QUIET)
    folder = f"{tmp_path}/3/base+train.steps=1+evaluation.limit=7"
    assert commands.lines[-1] == (
        f"wedlm_jax.evaluate --exp base --workdir {folder} --out {folder}/evaluation evaluation.limit=7"
    )


def test_the_folder_of_a_stage_is_one_that_train_takes(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    mixture = 'data.mixture=[{"source": "text", "path": "texts/*.txt"}]'
    for override in ("init_from=runs/base@best", "init_from=runs/base@500", "init_from=~/base@best", mixture):
        slug = Path(Stage("base", (override,)).slug)
        assert checked_workdir(slug) == slug and len(slug.parts) == 1
        refuse_unfit_path(slug)


def test_the_folder_of_many_stages_with_long_overrides_has_a_name_that_file_systems_take(tmp_path):
    long = Stage("base", ("data.mixture=" + ", ".join(f"größer{number}" for number in range(40)),))
    names = {folder_name([long, Stage("adapted", (f"train.steps={steps}",)), long]) for steps in (1, 2)}
    assert len(names) == 2 and all(name.startswith("base+data.mixture=größer0") for name in names)
    for name in names:
        (tmp_path / name).mkdir()
    assert folder_name([Stage("base", ("train.steps=1",)), Stage("x")]) == "base+train.steps=1__x"


def test_stages_that_would_share_a_folder_are_refused():
    arms = {label: (Stage("x", (f"data.path={path}",)),) for label, path in (("one", "a/b"), ("other", "a_b"))}
    with pytest.raises(
        UserError, match=r"two different stages would share the folder x\+data.path=a_b; spell one otherwise"
    ):
        Study("s", arms, (Measure("m", "f"),))


@pytest.mark.parametrize("file", ["config.json", "adapter.json", "adapter_config.json"])
def test_a_folder_of_another_kind_of_model_is_no_workdir(tmp_path, file):
    """Read as what it was, it would hide the checkpoints that are trained into it."""
    (tmp_path / file).write_text("{}")
    with pytest.raises(UserError, match="name another folder"):
        checked_workdir(tmp_path)


def test_the_summary_holds_each_seeds_value_by_arm_and_measure(tmp_path):
    summary = run_study(STUDY, tmp_path, Commands(), QUIET)
    assert summary["arms"] == {
        "J = 8": {"accuracy": [1.0, 1.0], "loss": [3.0, 5.0]},
        "J = 4": {"accuracy": [0.5, 0.5], "loss": [3.0, 5.0]},
    }
    assert json.loads((tmp_path / "results.json").read_text()) == summary
    assert (tmp_path / "results.png").stat().st_size > 10_000


def test_brackets_in_names_are_shown(tmp_path):
    console = Console(file=io.StringIO(), width=200)
    measures = (dataclasses.replace(STUDY.measures[0], label="tokens [per forward]"),)
    arms = {f"{arm} [best]": stages for arm, stages in STUDY.arms.items()}
    run_study(dataclasses.replace(STUDY, name="s[1]", arms=arms, measures=measures), tmp_path, Commands(), console)
    text = console.file.getvalue()
    assert text.count("J = 8 [best]") == 3 and "s[1]: mean" in text and "tokens [per forward]" in text


@pytest.mark.parametrize(("seeds", "cell"), [((3,), "3.000 "), ((3, 5), "4.000 (3.000 to 5.000)")])
def test_the_table_gives_a_range_where_there_are_several_seeds(seeds, cell, tmp_path):
    console = Console(file=io.StringIO(), width=200)
    run_study(dataclasses.replace(STUDY, seeds=seeds), tmp_path, Commands(), console)
    text = console.file.getvalue()
    assert cell in text and (" to " in text) == (len(seeds) > 1)


def test_a_stopped_study_evaluates_only_what_is_missing(tmp_path):
    class Interrupted(Commands):
        def __call__(self, arguments):
            if len(self.lines) == 6:
                raise KeyboardInterrupt
            super().__call__(arguments)

    with pytest.raises(KeyboardInterrupt):
        run_study(STUDY, tmp_path, Interrupted(), QUIET)
    again = Commands()
    run_study(STUDY, tmp_path, again, QUIET)
    assert again.evaluations == 2, "two of four evaluations were there"


def test_what_was_evaluated_with_other_settings_is_evaluated_again_and_said(tmp_path):
    run_study(STUDY, tmp_path, Commands(), QUIET)
    console, more = Console(file=io.StringIO(), width=200), Commands(problems_per_task=9)
    run_study(STUDY, tmp_path, more, console)
    assert more.evaluations == 4
    assert console.file.getvalue().count("results.json: evaluated anew (problems_per_task: 2 -> 9)") == 4
    same = Commands(problems_per_task=9)
    run_study(STUDY, tmp_path, same, QUIET)
    assert same.evaluations == 0


def test_what_was_evaluated_before_its_training_came_to_its_end_is_evaluated_again_and_said(tmp_path, monkeypatch):
    """By hand, while the study was stopped: a finished study showed numbers of half-trained models."""
    monkeypatch.setattr(checkpoint, "saved_steps", lambda workdir: [1])
    run_study(STUDY, tmp_path, Commands(step=1), QUIET)
    monkeypatch.setattr(checkpoint, "saved_steps", lambda workdir: [1, 2])
    console, again, same = Console(file=io.StringIO(), width=200), Commands(step=2), Commands(step=2)
    run_study(STUDY, tmp_path, again, console)
    assert again.evaluations == console.file.getvalue().count("results.json: evaluated anew (step: 1 -> 2)") == 4
    run_study(STUDY, tmp_path, same, QUIET)
    assert same.evaluations == 0


def test_questions_that_were_changed_in_their_file_are_asked_again_and_said(tmp_path):
    """A file that is gone, or results of an earlier version, tell nothing."""
    file, workdir = tmp_path / "qa.jsonl", tmp_path / "study"
    file.write_text("one")
    asked = functools.partial(Commands, questions=str(file))
    run_study(STUDY, workdir, asked(), QUIET)
    for content, evaluations in (("two", 4), ("two", 0), (None, 0)):
        file.unlink() if content is None else file.write_text(content)
        console, again = Console(file=io.StringIO(), width=200), asked()
        run_study(STUDY, workdir, again, console)
        said = f"results.json: evaluated anew ({file} holds others)"
        assert again.evaluations == console.file.getvalue().count(said) == evaluations


def test_results_that_do_not_name_a_setting_are_kept(tmp_path):
    """Those of earlier versions."""
    run_study(STUDY, tmp_path, Commands(), QUIET)
    unnamed = tmp_path / "3" / "base__adapted" / "evaluation" / "results.json"
    results = json.loads(unnamed.read_text())
    del results["evaluation"]
    unnamed.write_text(json.dumps(results))
    again = Commands(a_new_setting=1)
    run_study(STUDY, tmp_path, again, QUIET)
    assert again.evaluations == 0


def test_an_evaluation_without_the_measured_number_is_named(tmp_path):
    def evaluates_to_nothing(arguments):
        if arguments[0] == "wedlm_jax.evaluate":
            folder = Path(arguments[-1]) / "evaluation"
            folder.mkdir(parents=True)
            (folder / "results.json").write_text('{"rows": []}')

    with pytest.raises(
        UserError, match=r"3/base__adapted/evaluation/results.json: holds no row of .* \(none\); name one of"
    ):
        run_study(STUDY, tmp_path, evaluates_to_nothing, QUIET)


def test_a_measure_of_a_row_or_field_that_no_evaluation_has_is_named():
    rows = [{"task": "counting", "label": "streaming, tau=0.4", "accuracy": 1.0}]
    other = Measure("exact", "accuracy", "counting", "streaming, tau=0.40")
    with pytest.raises(
        UserError,
        match=r"r.json: holds no row of counting by 'streaming, tau=0.40' for exact \(counting by streaming, tau=0.4\); name",
    ):
        other.read({"rows": rows}, Path("r.json"))
    with pytest.raises(UserError, match="r.json: holds no bits; remove it, and the study evaluates again"):
        Measure("bits", "bits", "counting", "streaming, tau=0.4").read({"rows": rows}, Path("r.json"))


def test_an_evaluation_that_was_cut_off_is_named_and_can_be_made_again(tmp_path):
    run_study(STUDY, tmp_path, Commands(), QUIET)
    source = tmp_path / "5" / "base__adapted" / "evaluation" / "results.json"
    source.write_text('{"rows": [')
    with pytest.raises(
        UserError, match=r"5/base__adapted/evaluation/results.json: is not JSON \(.*\); remove it, and the"
    ):
        run_study(STUDY, tmp_path, Commands(), QUIET)
    source.unlink()
    source.parent.rmdir()
    run_study(STUDY, tmp_path, Commands(), QUIET)


def test_a_study_that_cannot_be_saved_leaves_the_summary_before_it(tmp_path):
    run_study(STUDY, tmp_path, Commands(), QUIET)
    before = (tmp_path / "results.json").read_bytes()
    with pytest.raises(UserError, match=r"results.json: cannot be written \(file too large\)"), full_disk():
        run_study(STUDY, tmp_path, lambda arguments: None, QUIET)  # all is there
    assert (tmp_path / "results.json").read_bytes() == before


def test_a_command_that_fails_ends_the_study_with_its_line(tmp_path):
    study = Study("x", {"a": (Stage("no_such_experiment"),)}, MEASURES, seeds=(0,))
    with pytest.raises(UserError, match=r"python -m wedlm_jax.train --exp no_such_experiment .* ended with 2; mend"):
        run_study(study, tmp_path, console=QUIET)


def results_of(**by_label):
    return {"rows": [{"task": "sums", "label": label, "accuracy": x} for label, x in by_label.items()]}


def test_a_difference_is_the_decoders_number_minus_the_other_rows():
    difference = Measure("gain", "accuracy", task="sums", decoder="adapted", minus="base")
    assert difference.read(results_of(base=0.75, adapted=0.5, other=9.0), Path("x")) == -0.25
    for missing in ("base", "adapted"):
        rest = {"base": 0.75, "adapted": 0.5, "other": 9.0}
        del rest[missing]
        with pytest.raises(UserError, match="x: holds no row of sums by .* for gain .*; name one of these"):
            difference.read(results_of(**rest), Path("x"))


def test_a_difference_needs_a_task_whose_rows_it_subtracts():
    with pytest.raises(UserError, match="measure loss: minus=base names a row of a task; set task and decoder"):
        Measure("loss", "loss", minus="base")


def test_a_threshold_is_a_line_through_its_own_panel_alone(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(
        Axes, "axvline", lambda axes, x, **style: drawn.append((axes.get_subplotspec().colspan.start, x))
    )
    measures = (MEASURES[0], dataclasses.replace(MEASURES[1], threshold=0.25))
    run_study(dataclasses.replace(STUDY, measures=measures), tmp_path, Commands(), QUIET)
    assert drawn == [(1, 0.25)]


def test_a_study_that_a_notebook_runs_keeps_its_backend(tmp_path, monkeypatch):
    monkeypatch.setattr(matplotlib, "use", lambda backend: pytest.fail(f"switches it to {backend}"))
    monkeypatch.delattr(matplotlib, "pyplot", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)  # whose import fails
    run_study(STUDY, tmp_path, Commands(), QUIET)


CURVE = Curve("acceptance", "accepted", "sums", "AR", "slots ahead")


def test_a_curve_is_a_panel_with_a_line_for_each_arm(tmp_path, monkeypatch):
    drawn = {}
    plot = Axes.plot

    def watched(axes, x, y, *style, label=None, **options):
        drawn.update({} if label is None else {label: (list(x), list(y))})
        return plot(axes, x, y, *style, label=label, **options)

    monkeypatch.setattr(Axes, "plot", watched)
    summary = run_study(dataclasses.replace(STUDY, curves=(CURVE,)), tmp_path, Commands(), QUIET)
    assert summary["curves"]["J = 4"] == {"acceptance": [[0.5, 0.25], [0.5, 0.25]]}
    assert drawn == {"J = 8": ([1, 2], [1.0, 0.5]), "J = 4": ([1, 2], [0.5, 0.25])}
    assert json.loads((tmp_path / "results.json").read_text()) == summary


def test_the_mean_of_curves_counts_what_a_shorter_one_lacks_as_0():
    assert CURVE.mean([[1.0, 0.5], [0.5]]) == [0.75, 0.25]
    with pytest.raises(UserError, match="x: holds no acceptance; remove it"):
        CURVE.read(results_of(AR=1.0), Path("x"))


@pytest.mark.parametrize("missing", [{"arms": {}}, {"arms": {"a": ()}}, {"measures": ()}, {"seeds": ()}])
def test_a_study_of_nothing_is_refused(missing):
    given = {"arms": {"a": (BASE,)}, "measures": MEASURES, "seeds": (0,)} | missing
    with pytest.raises(UserError, match="study s: needs arms"):
        Study("s", **given)


@pytest.mark.parametrize(
    "twice, said",
    [({"measures": MEASURES + MEASURES[:1]}, "measures name 'accuracy'"), ({"seeds": (1, 2, 1)}, "seeds name 1")],
)
def test_a_study_that_names_one_thing_twice_is_refused(twice, said):
    given = {"arms": {"a": (BASE,)}, "measures": MEASURES, "seeds": (0,)} | twice
    with pytest.raises(UserError, match=f"study s: {said} twice; name each once"):
        Study("s", **given)


def test_train_runs_a_study_by_name(monkeypatch, tmp_path):
    ran = []
    monkeypatch.setattr(train, "run_study", lambda study, workdir: ran.append((study.name, workdir)))
    monkeypatch.setattr("sys.argv", ["train", "--exp", "ablations", "--workdir", str(tmp_path)])
    train.main()
    assert ran == [("ablations", tmp_path)]


@pytest.mark.parametrize("name", [name for name in list_experiments() if isinstance(load_named(name), Study)])
def test_what_a_study_reads_is_what_its_last_stages_write(name):
    """Every measure of a task names a row of that evaluation, or its run would end in an error after all the training."""
    study = load_named(name)
    for stages in study.arms.values():
        config = load_experiment(stages[-1].experiment).evaluation
        labels = {setting.label for setting in settings_of(config, with_base=len(stages) > 1)}
        for measure in study.measures:
            if measure.task is not None:
                assert measure.task in config.tasks
                assert {measure.decoder, measure.minus or measure.decoder} <= labels
            else:
                assert config.in_place or not measure.field.endswith("_in_place")
