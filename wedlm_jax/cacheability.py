"""Measure p_cache of streaming against block-wise decoding on the same prompts, and the order of filling that decides it.

python -m wedlm_jax.cacheability --model exports/quickstart --out cacheability
python -m wedlm_jax.cacheability --model exports/quickstart --tasks counting --thresholds 0.4 1 --fill-rules run
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console

from wedlm_jax.decode.config import DecodeConfig
from wedlm_jax.errors import UserError, entry
from wedlm_jax.evals.cacheability_plot import plot_cacheability
from wedlm_jax.evals.questions import MatchFlag, QuestionsFlag, asked, refuse_both, scored_by
from wedlm_jax.evals.show import P_CACHE_NOTE, bar_of, cut_short, device, points_table, ran
from wedlm_jax.evals.sweep import ADAPTED, Row, Setting
from wedlm_jax.evals.tradeoff import Point, measure
from wedlm_jax.flags import each_once, parse, refuse_beside, require_positive, require_some
from wedlm_jax.model_flags import ChatModelFlags
from wedlm_jax.results import make_folder, save_figure, tell_written, write_results

COMMITTED = 0.95  # of the filled tokens, by the very next forward: the goal on counting


@dataclasses.dataclass(frozen=True)
class Cacheability(ChatModelFlags):
    tasks: tuple[Literal["word_problems", "counting", "copying"], ...] = ("counting", "word_problems")
    questions: QuestionsFlag = None
    match: MatchFlag = "number"
    limit: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Problems a task at most; if not given 100, and all of --questions."""
    thresholds: tuple[float, ...] = (0.1, 0.4, 1.0)
    """tau of streaming, in nats."""
    fill_rules: tuple[Literal["each", "run"], ...] = ("each", "run")
    """Of streaming: each mask below tau (Algorithm 1), or those from the left up to the first that is not."""
    confidences: tuple[float, ...] = (0.5, 0.9, 0.99)
    """Thresholds of block-wise decoding."""
    batch_size: int = 8
    out: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Where cacheability.json, written anew after every setting, and cacheability.png go; nowhere if not given."""
    decode: Annotated[DecodeConfig, tyro.conf.arg(name="")] = DecodeConfig(max_new_tokens=64, block_size=16)


def settings_of(args: Cacheability) -> list[Setting]:
    """Streaming with every fill rule and tau, block-wise with every confidence, and verified."""
    streaming = [
        Setting(
            f"streaming, {rule}, tau={tau:g}",
            ADAPTED,
            args.decode.by("streaming", fill_rule=rule, entropy_threshold=tau),
        )
        for rule in args.fill_rules
        for tau in args.thresholds
    ]
    blockwise = [
        Setting(
            f"block-wise, confidence={confidence:g}",
            ADAPTED,
            args.decode.by("blockwise", confidence_threshold=confidence),
        )
        for confidence in args.confidences
    ]
    return [*streaming, *blockwise, Setting("verified", ADAPTED, args.decode.by("verified"))]


def cacheability(args: Cacheability, console: Console) -> dict[str, tuple[Row, list[Point]]]:
    """Runs it, prints a table a task and what follows from it, and returns AR and the points by task."""
    settings = settings_of(args)
    model = args.load()
    tasks = asked(args, args.tasks, model)
    if args.out is not None:  # before the first forward
        make_folder(args.out)
    measured: dict[str, tuple[Row, list[Point]]] = {}
    with bar_of((1 + len(settings)) * sum(len(problems) for _, problems in tasks)) as (on_batch, above):

        def on_point(ar: Row, points: list[Point]) -> None:
            measured[ar.task] = ar, points
            above.print(f"{ar.task}: {points[-1].in_words()}", highlight=False, soft_wrap=True, markup=False)
            if args.out is not None:
                save(args.out, args, ran(model.config, args.mesh), measured)

        for of, problems in tasks:
            measure(model, settings, of, problems, batch_size=args.batch_size, on_batch=on_batch, on_point=on_point)
    how = ", ".join([f"batches of {args.batch_size}", device(args.mesh), *args.decode.changes(Cacheability.decode)])
    for name, (ar, points) in measured.items():
        console.print(points_table(ar, points, f"{args.model}: {name}, n = {ar.n}, {how}"))
        for line in findings(name, points):
            console.print(line, highlight=False, markup=False)
        for line in cut_short([ar]):
            console.print(line, style="yellow", markup=False)
    console.print(P_CACHE_NOTE, style="dim")
    if args.out is not None:
        points_of = {name: points for name, (_, points) in measured.items()}
        save_figure(args.out / "cacheability.png", plot_cacheability(points_of, f"{args.model}: {how}"))
        tell_written(console, args.out / "cacheability.json", args.out / "cacheability.png")
    return measured


def save(out: Path, args: Cacheability, how: dict[str, Any], measured: dict[str, tuple[Row, list[Point]]]) -> None:
    results = {
        "model": args.model, **scored_by(args), **how,
        "tasks": {
            name: {"ar": dataclasses.asdict(ar), "points": [p.as_json() for p in points]}
            for name, (ar, points) in measured.items()
        },
    }  # fmt: skip
    write_results(out, "cacheability", results)


def findings(name: str, points: Sequence[Point]) -> list[str]:
    """Which settings commit what they fill at once, and the best p_cache of each decoder at the accuracy that both reach."""
    by_decoder = {
        decoder: [p for p in points if p.row.settings["decoder"] == decoder] for decoder in ("streaming", "blockwise")
    }
    filling = [p for p in by_decoder["streaming"] if p.order.filled]  # verify="fallback" may emit AR tokens alone
    committing = [p for p in filling if p.order.commit_rate >= COMMITTED]
    listed = "; ".join(
        f"{p.row.label} ({p.order.commit_rate:.2f}, {p.accuracy:.0%} exact, p_cache {p.row.p_cache:.2f})"
        for p in committing
    )
    if committing:
        said = f"streaming commits {COMMITTED:.0%} of the filled tokens by the next forward with {listed}."
    elif filling:
        most = max(filling, key=lambda p: p.order.commit_rate)
        said = (
            f"no setting of streaming commits {COMMITTED:.0%} of the filled tokens by the next forward; the most is "
            f"{most.order.commit_rate:.2f} ({most.row.label})."
        )
    else:
        said = "no setting of streaming fills a mask."
    floor = min(max(p.accuracy for p in some) for some in by_decoder.values())
    best = [max((p for p in some if p.accuracy >= floor), key=lambda p: p.row.p_cache) for some in by_decoder.values()]
    told = " against ".join(f"{p.row.p_cache:.2f} ({p.row.label}, {p.accuracy:.0%})" for p in best)
    return [f"{name}: {said}", f"{name}: best p_cache among settings at least {floor:.0%} exact: {told}."]


@entry
def main() -> None:
    args = each_once(parse(Cacheability, prog="python -m wedlm_jax.cacheability", description=__doc__))
    require_positive(args, "limit", "batch_size")
    instead = {
        "entropy_threshold": "--thresholds", "fill_rule": "--fill-rules", "confidence_threshold": "--confidences",
    }  # fmt: skip
    refuse_beside(args.decode, instead)
    refuse_both(args, "tasks")
    if args.decode.decoder != DecodeConfig.decoder:
        raise UserError(
            f"--decoder {args.decode.decoder}: streaming, block-wise and verified are compared; leave it out"
        )
    require_some(args, "tasks", "thresholds", "fill_rules", "confidences")
    cacheability(args, Console())


if __name__ == "__main__":
    main()
