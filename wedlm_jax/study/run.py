"""A study from its first training to its table and plot; what is there already is kept, but for results of another evaluation, of
other questions or of an earlier step."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from wedlm_jax.config_tree import differences
from wedlm_jax.errors import UserError
from wedlm_jax.results import digest_of_file, finite, save_figure, tell_written, write_json
from wedlm_jax.study.child_process import run_command
from wedlm_jax.study.design import Stage, Study, folder_name
from wedlm_jax.study.report import as_table, plot

RESULTS = Path("evaluation") / "results.json"  # in a workdir, written by wedlm_jax.evaluate
EXPERIMENT = "experiment.json"  # there too, in which wedlm_jax.train, of a finished run too, notes what it is told now


def run_study(
    study: Study,
    workdir: Path,
    run: Callable[[list[str]], None] | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """Trains what is missing, evaluates that and what was evaluated with other settings, questions or weights; prints
    a table; writes results.json and results.png.

    Args:
      study: what to compare.
      workdir: runs lie in workdir/SEED/STAGES; arms whose first stages are the same share them.
      run: runs one command, given as its arguments after `python -m`; a child process if not given.
      console: where the table goes.

    Returns:
      {"name", "seeds", "arms": {arm: {measure: [a value for each seed]}}}, and {"curves": {arm: {curve: [a list for each seed]}}}
      where the study has curves.
    """
    console = console or Console()
    run = run or run_command
    values: dict[str, dict[str, list[float]]] = {arm: {m.label: [] for m in study.measures} for arm in study.arms}
    curves: dict[str, dict[str, list[list[float]]]] = {arm: {c.label: [] for c in study.curves} for arm in study.arms}
    trained: set[Path] = set()
    for seed in study.seeds:
        for arm, stages in study.arms.items():
            console.rule(escape(f"{study.name}: {arm}, seed {seed}"))
            before: Path | None = None
            for number, stage in enumerate(stages, 1):
                folder = workdir / str(seed) / folder_name(stages[:number])
                if folder not in trained:
                    run([*_training(stage, folder, before, seed)])
                    trained.add(folder)
                before = folder
            source = folder / RESULTS
            missing = not source.is_file()
            changed = [] if missing else _changed(source, folder)
            if changed:
                console.print(f"{source}: evaluated anew ({'; '.join(changed)})", soft_wrap=True, markup=False)
            if missing or changed:
                own = [text for text in stages[-1].overrides if text.startswith("evaluation.")]
                out = ["--out", str(source.parent)] if own else []  # else they would go to a folder of their own
                run(["wedlm_jax.evaluate", "--exp", stages[-1].experiment, "--workdir", str(folder), *out, *own])
            results = _read(source)
            for measure in study.measures:
                values[arm][measure.label].append(measure.read(results, source))
            for curve in study.curves:
                curves[arm][curve.label].append(curve.read(results, source))
    summary: dict[str, Any] = {"name": study.name, "seeds": list(study.seeds), "arms": values}
    if study.curves:
        summary["curves"] = curves
    write_json(workdir / "results.json", summary)
    save_figure(workdir / "results.png", plot(study, values, curves))
    console.print(as_table(study, values))
    tell_written(console, workdir / "results.json", workdir / "results.png")
    return summary


def _changed(source: Path, workdir: Path) -> list[str]:
    """The settings of evaluation, the step, and what the file of questions holds, that are others now than when the results in
    `source` were made, as "name: then -> now". Of what they do not name, since it came after them, and of a file that is gone
    nobody can say: what is there is kept."""
    from wedlm_jax.checkpoint import saved_steps  # here, because every experiment imports this module

    results = _read(source)
    made, step = results.get("evaluation", {}), results.get("step")
    now = finite(_read(workdir / EXPERIMENT)["evaluation"]) if made else {}
    newest = [] if step is None else saved_steps(workdir)[-1:]
    trained_on = [f"step: {step} -> {n}" for n in newest if n != step]
    asked, questions = results.get("questions_sha256"), now.get("questions")
    there = digest_of_file(Path(questions).expanduser()) if asked and questions else None
    others = [f"{questions} holds others"] if there not in (None, asked) else []
    return [*differences(made, {name: now.get(name) for name in made}), *trained_on, *others]


def _read(source: Path) -> dict[str, Any]:
    try:
        return json.loads(source.read_text(encoding="utf-8"))
    except ValueError as error:  # cut off, or not UTF-8
        raise UserError(f"{source}: is not JSON ({error}); remove it, and the study evaluates again") from error


def _training(stage: Stage, folder: Path, before: Path | None, seed: int) -> Iterator[str]:
    yield from ("wedlm_jax.train", "--exp", stage.experiment, "--workdir", str(folder))
    yield from stage.overrides
    yield f"train.seed={seed}"
    if before is not None:
        yield f"init_from={before}"
