"""Measure speed against quality over tau, lambda and W, name the Pareto front and where it fails, and what predicts speed.

python -m wedlm_jax.tradeoff --model exports/quickstart --task word_problems --out tradeoff
python -m wedlm_jax.tradeoff --model exports/quickstart --task counting --windows 8 16 32 --thresholds 0.1 0.4 inf
python -m wedlm_jax.tradeoff --model DIR --questions gsm8k.jsonl --limit 200 --max-new-tokens 512 --out tradeoff
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console

from wedlm_jax.decode.config import DecodeConfig
from wedlm_jax.errors import UserError, entry
from wedlm_jax.evals.questions import MatchFlag, QuestionsFlag, asked, refuse_both, scored_by
from wedlm_jax.evals.show import bar_of, cut_short, device, points_table, ran
from wedlm_jax.evals.sweep import Row
from wedlm_jax.evals.tradeoff import (
    KEPT_ACCURACY,
    Point,
    failed,
    failure_region,
    grid,
    measure,
    pareto_front,
    rank_correlations,
)
from wedlm_jax.evals.tradeoff_plot import plot_tradeoff
from wedlm_jax.flags import each_once, parse, refuse_beside, require_positive, require_some
from wedlm_jax.model_flags import ChatModelFlags
from wedlm_jax.results import make_folder, save_figure, tell_written, write_results


@dataclasses.dataclass(frozen=True)
class Tradeoff(ChatModelFlags):
    task: Literal["word_problems", "counting", "copying"] = "word_problems"
    questions: QuestionsFlag = None
    match: MatchFlag = "number"
    limit: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Problems at most; if not given 100 of a task, and all of --questions."""
    windows: tuple[int, ...] = (16,)
    """W."""
    thresholds: tuple[float, ...] = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6, float("inf"))
    """tau in nats."""
    penalties: tuple[float, ...] = (0.0, 1e-3, 1e-2, 2e-2, 1e-1, 1.0, 10.0)
    """lambda in nats per slot."""
    batch_size: int = 8
    out: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Where tradeoff.json, written anew after every setting, and tradeoff.png go; nowhere if not given."""
    decode: Annotated[DecodeConfig, tyro.conf.arg(name="")] = DecodeConfig(max_new_tokens=64)


def tradeoff(args: Tradeoff, console: Console) -> list[Point]:
    """Runs it, prints a table and what follows from it, and returns the points."""
    settings = grid(args.decode, args.windows, args.thresholds, args.penalties)
    model = args.load()
    ((chosen, problems),) = asked(args, [args.task], model)
    if args.out is not None:  # before the first forward
        make_folder(args.out)
    with bar_of((1 + len(settings)) * len(problems)) as (on_batch, above):

        def on_point(ar: Row, points: list[Point]) -> None:  # a large grid takes hours
            above.print(points[-1].in_words(), highlight=False, soft_wrap=True)
            if args.out is not None:
                save(args.out, args, ran(model.config, args.mesh), ar, points)

        ar, points = measure(
            model, settings, chosen, problems, batch_size=args.batch_size, on_batch=on_batch, on_point=on_point
        )
    changes = args.decode.changes(Tradeoff.decode.by(args.decode.decoder))
    heading = f"{args.model}: {args.decode.decoder} on {chosen.name}"
    title = ", ".join([heading, f"n = {ar.n}", f"batches of {args.batch_size}", device(args.mesh), *changes])
    console.print(points_table(ar, points, title, starred=pareto_front(points) if ar.accuracy else ()))
    for line in findings(ar, points):
        console.print(line)
    for line in cut_short([ar]):
        console.print(line, style="yellow", markup=False)
    if args.out is not None:
        save_figure(args.out / "tradeoff.png", plot_tradeoff(ar, points, title))
        tell_written(console, args.out / "tradeoff.json", args.out / "tradeoff.png")
    return points


def save(out: Path, args: Tradeoff, how: dict[str, Any], ar: Row, points: list[Point]) -> None:
    results = {
        "model": args.model, **scored_by(args), **how, "ar": dataclasses.asdict(ar),
        "points": [p.as_json() for p in points],
        "pareto_front": [p.row.label for p in pareto_front(points)] if ar.accuracy else [],
        "failed": [p.row.label for p in failed(points, ar.accuracy or 0.0)],
        "rank_correlations": rank_correlations(points),
    }  # fmt: skip
    write_results(out, "tradeoff", results)


def findings(ar: Row, points: list[Point]) -> list[str]:
    """The front and where settings fail, if AR solves any problem, and the rank correlations, a line each."""
    assert ar.accuracy is not None
    if not ar.accuracy:  # any setting is as good as AR then
        return [
            "AR solves none of the problems, so exact match says nothing of the settings here.",
            _correlations(points),
        ]
    front = "; ".join(f"{p.row.label} ({p.accuracy:.0%})" for p in pareto_front(points))
    lines = [f"* Pareto front, from fast to exact: {front}.", _failures(points, ar.accuracy, "AR's")]
    best = max(points, key=lambda p: p.accuracy)
    if best.accuracy and len(failed(points, ar.accuracy)) == len(points):  # then that says nothing of the settings
        lines.append(_failures(points, best.accuracy, f"the best setting's ({best.row.label})"))
    return [*lines, _correlations(points)]


def _correlations(points: list[Point]) -> str:
    if len(points) < 3:  # of two, it is 1 or -1 whatever they are
        return f"Settings: {len(points)}, too few for a rank correlation of tokens/s."
    of = rank_correlations(points).items()
    told = ", ".join(f"{name} (does not vary)" if math.isnan(rho) else f"{name} {rho:+.2f}" for name, rho in of)
    return f"Rank correlation of tokens/s with {told} (Spearman's, over {len(points)} settings)."


def _failures(points: list[Point], accuracy: float, whose: str) -> str:
    least = f"under {KEPT_ACCURACY:.0%} of {whose} exact match of {accuracy:.0%}"
    region = failure_region(points, accuracy)
    many = f"{len(failed(points, accuracy))} of {len(points)} settings"
    return f"{many} are {least}: {'. '.join(region)}." if region else f"No setting is {least}."


@entry
def main() -> None:
    args = each_once(parse(Tradeoff, prog="python -m wedlm_jax.tradeoff", description=__doc__))
    require_positive(args, "windows", "limit", "batch_size")
    refuse_both(args, "task")
    gridded = {"window_size": "--windows", "entropy_threshold": "--thresholds", "distance_penalty": "--penalties"}
    refuse_beside(args.decode, gridded)
    require_some(args, "thresholds", "penalties")
    if args.decode.decoder not in ("streaming", "verified"):
        raise UserError(f"--decoder {args.decode.decoder}: has no tau and lambda; choose streaming or verified")
    tradeoff(args, Console())


if __name__ == "__main__":
    main()
