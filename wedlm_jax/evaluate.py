"""Decode held-out problems with every decoder, measure held-out text: one table, JSON and a plot.

All is computed in float32, on accelerators too, so that verified decoding equals AR token for token, unless --dtype bfloat16
says otherwise; for speed there take bench or tradeoff, which compute in bfloat16.

python -m wedlm_jax.evaluate --exp quickstart
python -m wedlm_jax.evaluate --exp sft evaluation.text_prompts=8 evaluation.max_new_tokens=64
python -m wedlm_jax.evaluate --model exports/quickstart --task counting --decoder verified
python -m wedlm_jax.evaluate --model DIR --questions gsm8k.jsonl --max-new-tokens 512 --decoder verified
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console

from wedlm_jax import pretrained
from wedlm_jax.checkpoint import chosen_step, saved_steps
from wedlm_jax.config_tree import differences
from wedlm_jax.data.pipeline import batches
from wedlm_jax.data.quickstart_tasks import Problem
from wedlm_jax.data.records import BadRecord
from wedlm_jax.data.stdlib_code import code_files
from wedlm_jax.data.tokenizer import encode_text, start_of_text
from wedlm_jax.decode.config import DecodeConfig
from wedlm_jax.decode.measured_windows import measured_in_use
from wedlm_jax.decode.stats import Completion
from wedlm_jax.errors import UserError, entry
from wedlm_jax.evals import answers
from wedlm_jax.evals.config import EvaluationConfig
from wedlm_jax.evals.likelihood import bits_per_byte, recovery_by_ratio
from wedlm_jax.evals.plots import plot_results
from wedlm_jax.evals.problems import tasks_of
from wedlm_jax.evals.questions import MatchFlag, QuestionsFlag, asked, refuse_both, scored_by
from wedlm_jax.evals.show import bar_of, cut_short, device, gained_and_lost, ran, results_table
from wedlm_jax.evals.show_texts import show_continuations, show_one_decode
from wedlm_jax.evals.sweep import ADAPTED, BASE, Row, Setting, settings_of, sweep
from wedlm_jax.evals.tasks import Task, task
from wedlm_jax.experiment import Experiment, load_experiment
from wedlm_jax.flags import AdapterFlag, ChatTemplateFlag, parse, refuse_beside, require_positive
from wedlm_jax.model.handle import Model
from wedlm_jax.model.int8 import in_int8, on_host
from wedlm_jax.model_file import ModelFile
from wedlm_jax.model_flags import variables_of
from wedlm_jax.preemption import end_with_study
from wedlm_jax.results import digest_of_file, make_folder, save_figure, tell_written, write_json, write_results
from wedlm_jax.sharding import ONE_DEVICE, MeshConfig, mesh_of_first

ROWS_OF_A_FORWARD = 8  # where text, or masks in it, are scored
LONGEST_PART = 160  # characters of a folder's name that say what was set; a file system has room for 255 bytes
UNFINISHED = "unfinished.json"  # beside results.json until that is there


@dataclasses.dataclass(frozen=True)
class Evaluate:
    overrides: tyro.conf.Positional[tuple[str, ...]] = ()
    """With --exp: evaluation.field=value, such as evaluation.problems_per_task=50."""
    exp: Annotated[str | None, tyro.conf.arg(metavar="NAME|FILE.py[:FUNCTION]")] = None
    """Evaluate the trained model of an experiment, as its `evaluation` section says."""
    workdir: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Where the experiment was trained, its newest step (DIR@500 and DIR@best name another); runs/NAME if not given."""
    model: Annotated[str | None, tyro.conf.arg(metavar="DIR")] = None
    """Or evaluate any model: HF directory, hub id, or workdir (its newest step; DIR@500 and DIR@best name another)."""
    adapter: AdapterFlag = None
    mesh: pretrained.MeshFlag = ONE_DEVICE
    chat_template_kwargs: ChatTemplateFlag = None
    dtype: Annotated[
        Literal["float32", "bfloat16"] | None,
        tyro.conf.arg(
            help="With --model: of parameters and compute; None is float32. bfloat16 takes half the memory, and there verified "
            "decoding need not equal AR."
        ),
    ] = None
    int8: bool = False
    """With --model: the kernels of its layers rounded to int8, as --dtype int8 does in other commands."""
    task: str | None = None
    """word_problems, counting or copying; with --exp this one alone."""
    questions: QuestionsFlag = None
    match: MatchFlag = "number"
    limit: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Problems a task at most, instead of what the experiment says (with --model: 100, of --questions all)."""
    batch_size: Annotated[int, tyro.conf.arg(metavar="N")] = 1
    """With --model: prompts decoded at once."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Where results.json, results.png and completions.jsonl go; if not given, with --exp WORKDIR/evaluation or beside it."""
    decode: Annotated[DecodeConfig, tyro.conf.arg(name="")] = DecodeConfig()


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything resolved and checked before the first forward."""

    title: str
    models: dict[str, Model]
    settings: list[Setting]
    tasks: list[tuple[Task, list[Problem]]]
    config: EvaluationConfig
    experiment: Experiment | None
    out: Path | None
    mesh: MeshConfig = ONE_DEVICE
    step: int | None = None  # of the experiment


def plan_experiment(args: Evaluate, name: str) -> Plan:
    """What `--exp NAME` asks for: the table of an adaptation, before and after."""
    if args.decode != DecodeConfig():
        raise UserError("decoder flags go with --model; an experiment decodes as its evaluation section says")
    for flag in ("adapter", "dtype", "int8", "chat_template_kwargs"):
        if getattr(args, flag):
            raise UserError(f"--{flag.replace('_', '-')} goes with --model DIR; an experiment has its own")
    refuse_beside(args, {name: f"evaluation.{name}=..." for name in ("questions", "match", "batch_size")})
    if others := [text for text in args.overrides if not text.startswith("evaluation.")]:
        raise UserError(f"{others[0]}: only evaluation.field=value can be set here; the rest is as it was trained")
    named = load_experiment(name, args.overrides)
    folder, step = pretrained.split_step(args.workdir or named.workdir)
    workdir = Path(folder)
    if not pretrained.is_workdir(workdir):
        at = "" if args.workdir is None else f" --workdir {workdir}"
        raise UserError(f"{workdir} holds no trained model; make it: python -m wedlm_jax.train --exp {name}{at}")
    # A step that is named, the best one by its number: it has a folder of its own, as a part of the evaluation has, since a study
    # takes WORKDIR/evaluation for the whole one of the newest.
    chosen = None if step is None else chosen_step(workdir, step)
    step_name = "" if chosen is None else f"@{chosen}"
    trained = Experiment.load(workdir)
    experiment = dataclasses.replace(trained, evaluation=named.evaluation)
    if changed := differences(trained.to_dict()["evaluation"], experiment.to_dict()["evaluation"]):
        print(f"note: not as the training was told (evaluation: {'; '.join(changed)})", file=sys.stderr)
    only = None if args.task is None else task(args.task)
    config = experiment.evaluation
    models = {ADAPTED: load_exact(f"{workdir}{step_name}", args.mesh)}
    problems = tasks_of(config, experiment.data, models[ADAPTED], only, args.limit)
    if (begun := ModelFile.read(workdir).init_from or experiment.init_from) is not None:
        base, kept = pretrained.split_step(begun)
        if isinstance(kept, int) and kept not in saved_steps(base):
            print(f"note: {begun}, where it started, is gone; the rows of its base are left out", file=sys.stderr)
        else:
            models[BASE] = load_exact(begun, args.mesh)
    settings = settings_of(config, with_base=BASE in models)
    other = [text.removeprefix("evaluation.").replace("/", "_") for text in args.overrides]
    part = "".join(f"-{given}" for given in (*other, args.task, args.limit) if given is not None)
    if len(part) > LONGEST_PART:
        part = f"-{hashlib.sha256(part.encode()).hexdigest()[:16]}"
    out = args.out or workdir / f"evaluation{step_name}{part}"
    title, newest = f"{experiment.name}{step_name}", saved_steps(workdir)[-1]
    return Plan(title, models, settings, problems, config, experiment, out, args.mesh, chosen or newest)


def plan_model(args: Evaluate, path: str) -> Plan:
    """What `--model DIR` with --task or --questions asks for: one decoder against AR of the same weights."""
    if (args.task is None) == (args.questions is None):
        raise UserError("--model needs one of --task (word_problems, counting or copying) and --questions FILE")
    if args.workdir is not None:
        raise UserError("--workdir goes with --exp; give the directory as --model DIR")
    if args.overrides:
        raise UserError(f"{args.overrides[0]}: goes with --exp; with --model the flags of decoders do")
    refuse_both(args, "task")
    if args.task is not None:
        task(args.task)  # before the model is loaded
    settings = [Setting("AR", ADAPTED, args.decode.by("ar"))]
    if args.decode.decoder != "ar":
        settings.append(Setting(args.decode.decoder, ADAPTED, args.decode))
    model = load_as_asked(args, path)
    tasks = asked(args, [args.task or ""], model)
    for line in measured_in_use(model, [args.decode]):
        print(line, file=sys.stderr)
    numbers = [name for name, given in (("bfloat16", args.dtype == "bfloat16"), ("int8", args.int8)) if given]
    title = f"{path} in {' and '.join(numbers)}" if numbers else path
    questions = str(args.questions) if args.questions else None
    config = EvaluationConfig(questions=questions, match=args.match, batch_size=args.batch_size)
    return Plan(title, {ADAPTED: model}, settings, tasks, config, None, args.out, args.mesh)


def load_exact(path: str, mesh: MeshConfig = ONE_DEVICE) -> Model:
    """A model in float32 at the highest matmul precision: what "verified equals AR" is claimed for."""
    return pretrained.load(path, "float32", mesh=mesh, matmul_precision="highest")


def load_as_asked(args: Evaluate, path: str) -> Model:
    """The model of `--model`, exact as by `load_exact` but for what its flags say."""
    mesh = mesh_of_first(args.mesh)  # before it takes long
    with on_host() if args.int8 else contextlib.nullcontext():
        model = pretrained.load(
            path, args.dtype or "float32", mesh=ONE_DEVICE if args.int8 else args.mesh, adapter=args.adapter,
            matmul_precision="highest", chat_template_kwargs=variables_of(args.chat_template_kwargs),
        )  # fmt: skip
    return in_int8(model, mesh, frees=True) if args.int8 else model


def evaluate(plan: Plan, console: Console) -> dict[str, Any]:
    """Runs the plan, prints as it goes, returns what results.json holds."""
    if plan.out is not None:  # before the first forward
        make_folder(plan.out)
    measured: dict[str, Any] = {}  # before what takes hours, which an error here would end
    if plan.experiment is not None and plan.config.held_out_files:
        if plan.experiment.data.source == "stdlib_code":
            measured["bits_per_byte"] = evaluate_text(plan, plan.experiment, console)
        else:
            console.print(f"bits per byte: left out, data.source={plan.experiment.data.source} has no files of code")
    if plan.experiment is not None and plan.config.masked_loss_rows:
        measured |= evaluate_masks(plan, plan.experiment, console)
    count = sum(len(problems) for _, problems in plan.tasks) * len(plan.settings)
    with bar_of(count) as (advance, _), answers.kept_in(plan.out if plan.tasks else None) as write:

        def on_batch(setting: Setting, task: Task, done: Sequence[tuple[Problem, Completion]]) -> None:
            advance(setting, task, done)
            write(setting, task, done)

        rows, completions = sweep(
            plan.models, plan.settings, plan.tasks, batch_size=plan.config.batch_size, on_batch=on_batch,
            on_task=lambda rows: keep(plan, rows),
        )  # fmt: skip
    if rows:
        console.print(results_table(rows, f"{plan.title}: batches of {plan.config.batch_size}, {device(plan.mesh)}"))
    for line in gained_and_lost(rows):
        console.print(line, soft_wrap=True, markup=False, highlight=False)
    for line in cut_short(rows):
        console.print(line, style="yellow", markup=False)
    results = as_results(plan, rows) | measured
    if continued := [(t, problems) for t, problems in plan.tasks if t.score is None]:
        results["continuations"] = show_continuations(plan.settings, *continued[0], completions, console)
    save(plan, rows, results, console)
    if plan.tasks:
        setting, problem = plan.settings[-1], plan.tasks[0][1][0]
        show_one_decode(plan.models[setting.weights], setting, problem, console)
    return results


def as_results(plan: Plan, rows: Sequence[Row]) -> dict[str, Any]:
    # A study looks whether they are others.
    told: dict[str, Any] = {"evaluation": dataclasses.asdict(plan.config), "step": plan.step}
    if plan.config.questions is not None:
        told["questions_sha256"] = digest_of_file(Path(plan.config.questions).expanduser())
    how = told if plan.experiment is not None else scored_by(plan.config)
    return {
        "name": plan.title, **how, **ran(next(iter(plan.models.values())).config, plan.mesh),
        "rows": [dataclasses.asdict(row) for row in rows],
    }  # fmt: skip


def keep(plan: Plan, rows: Sequence[Row]) -> None:
    """The rows of the tasks that are done. Not in results.json: a study takes that for a whole evaluation."""
    if plan.out is not None:
        write_json(plan.out / UNFINISHED, as_results(plan, rows))


def evaluate_text(plan: Plan, experiment: Experiment, console: Console) -> dict[str, Any]:
    """Bits per byte of held-out files, for every model."""
    texts = [file.text for file in code_files("held_out", experiment.data.path)][: plan.config.held_out_files]
    measured = {}
    for name, model in plan.models.items():
        bits = bits_per_byte(
            model, texts, functools.partial(encode_text, model.tokenizer), before=start_of_text(model.tokenizer),
            row_length=experiment.data.row_length, batch_size=ROWS_OF_A_FORWARD,
        )  # fmt: skip
        console.print(
            f"bits per byte, AR, {name}: {bits.value:.3f} ({len(texts)} held-out files, {bits.bytes:,} "
            f"bytes, {bits.tokens:,} tokens)"
        )
        measured[name] = {**dataclasses.asdict(bits), "bits_per_byte": bits.value}
    return measured


def evaluate_masks(plan: Plan, experiment: Experiment, console: Console) -> dict[str, Any]:
    """Loss and accuracy of masked tokens on held-out rows by mask ratio, in blocks of evaluation.block_size, and their means;
    with evaluation.in_place also without reordering."""
    model, block_size, asked = plan.models[ADAPTED], plan.config.block_size, plan.config.masked_loss_rows
    assert model.tokenizer is not None  # a workdir has one
    size = min(ROWS_OF_A_FORWARD, asked)
    data = dataclasses.replace(experiment.data, num_groups=1, num_workers=0)  # these are of training's batches
    stream = batches(data, model.tokenizer, block_size, size, plan.config.seed, "held_out")
    rows = [next(stream).first_rows(asked - done) for done in range(0, asked, size)]
    results: dict[str, Any] = {}
    for reorder in (True, False) if plan.config.in_place else (True,):
        by_ratio = recovery_by_ratio(model, rows, block_size=block_size, reorder=reorder)
        shown = ", ".join(f"{ratio:g}: {r.loss:.3f} ({r.accuracy:.0%})" for ratio, r in by_ratio.items())
        where = "" if reorder else ", masks in place"
        console.print(f"masked-token loss in nats (and tokens recovered) by mask ratio{where}: {shown}")
        for name in ("loss", "accuracy"):
            values = {f"{ratio:g}": getattr(recovery, name) for ratio, recovery in by_ratio.items()}
            key = f"masked_{name}" if reorder else f"masked_{name}_in_place"
            results |= {f"{key}_by_ratio": values, key: sum(values.values()) / len(values)}
    return results


def save(plan: Plan, rows: Sequence[Row], results: dict[str, Any], console: Console) -> None:
    if plan.out is None:
        return
    write_results(plan.out, "results", results)
    (plan.out / UNFINISHED).unlink(missing_ok=True)
    written = ["results.json"]
    if any(row.accuracy is not None for row in rows):
        save_figure(plan.out / "results.png", plot_results(rows, f"{plan.title} on {device(plan.mesh)}"))
        written.append("results.png")
    if plan.tasks:
        written.append(answers.NAME)
    tell_written(console, *(plan.out / name for name in written))


@entry
def main() -> None:
    end_with_study()
    args = parse(Evaluate, prog="python -m wedlm_jax.evaluate", description=__doc__)
    require_positive(args, "limit", "batch_size")
    try:
        if args.exp is not None and args.model is None:
            plan = plan_experiment(args, args.exp)
        elif args.model is not None and args.exp is None:
            plan = plan_model(args, args.model)
        else:
            raise UserError("give one of --exp NAME and --model DIR")
        evaluate(plan, Console())
    except BadRecord as error:  # data are read as training reads them, which may never have met this one
        mend = "give that setting to its python -m wedlm_jax.train, even where it has finished"
        raise UserError(f"{error}; data are read as training was told to: {mend}") from None


if __name__ == "__main__":
    main()
