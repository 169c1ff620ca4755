"""Speed against quality over the settings of a decoder: tau, lambda and W (Figures 4 and 5a of the paper)."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

from scipy.stats import spearmanr

from wedlm_jax.data.quickstart_tasks import Problem
from wedlm_jax.decode.config import DecodeConfig
from wedlm_jax.decode.prompts import encode_prompt
from wedlm_jax.evals.order import Order, filling_order
from wedlm_jax.evals.sweep import ADAPTED, OnBatch, Row, Setting, generate_rows, setting_by_setting
from wedlm_jax.evals.tasks import Task
from wedlm_jax.model.handle import Model

KEPT_ACCURACY = 0.9  # of the one that a setting is held against: below it the setting has failed


@dataclasses.dataclass(frozen=True)
class Point:
    """One setting."""

    row: Row
    order: Order

    @property
    def accuracy(self) -> float:
        assert self.row.accuracy is not None
        return self.row.accuracy

    def as_json(self) -> dict[str, Any]:
        """The row, and the order of filling."""
        order = {"commit_rate": self.order.commit_rate, "out_of_order": self.order.out_of_order}
        return dataclasses.asdict(self.row) | order

    def in_words(self) -> str:
        """One line, for as long as there is no table."""
        row = self.row
        speed = f"{row.tokens_per_second:,.0f} tokens/s, {row.tokens_per_forward:.2f} tokens per forward"
        return f"{row.label}: {self.accuracy:.0%} exact, {speed}, p_cache {row.p_cache:.2f}"

    @property
    def measures(self) -> dict[str, float]:
        """What may predict speed."""
        row = self.row
        return {
            "p_cache": row.p_cache,
            "tokens per forward": row.tokens_per_forward,
            "commit rate": self.order.commit_rate,
        }


def grid(
    config: DecodeConfig, windows: Sequence[int], thresholds: Sequence[float], penalties: Sequence[float]
) -> list[Setting]:
    """Every window size with every tau and lambda."""
    return [
        Setting(
            f"W={window}, tau={tau:g}, lambda={penalty:g}",
            ADAPTED,
            dataclasses.replace(config, window_size=window, entropy_threshold=tau, distance_penalty=penalty),
        )
        for window, tau, penalty in itertools.product(windows, thresholds, penalties)
    ]


def measure(
    model: Model,
    settings: Sequence[Setting],
    task: Task,
    problems: list[Problem],
    *,
    batch_size: int,
    on_batch: OnBatch = lambda setting, task, done: None,
    on_point: Callable[[Row, list[Point]], None] = lambda ar, points: None,
) -> tuple[Row, list[Point]]:
    """AR, and every setting: exact match and speed from the compiled loop, the order of filling from a traced run.

    Args:
      on_batch: as of `sweep`.
      on_point: told after every setting what there is by then: AR, and the points.
    """
    ar = Setting("AR", ADAPTED, settings[0].config.by("ar"))
    prompts = [encode_prompt(model, problem.prompt) for problem in problems]
    lengths = [len(prompt) for prompt in prompts]

    def order(setting: Setting) -> Order:
        batches = [(i, prompts[i : i + batch_size]) for i in range(0, len(prompts), batch_size)]
        traced = [c for i, batch in batches for c in generate_rows(model, batch, setting.config, i, trace=True)]
        return filling_order(traced, lengths)

    tasks = [(task, problems)]
    found = setting_by_setting(model, [ar, *settings], tasks, batch_size=batch_size, on_batch=on_batch)
    of_ar = next(found).rows[0]
    points: list[Point] = []
    for measured in found:
        points.append(Point(measured.rows[0], order(measured.setting)))
        on_point(of_ar, points)
    return of_ar, points


def pareto_front(points: Sequence[Point]) -> list[Point]:
    """Those that no other beats in both exact match and tokens per second, by speed."""
    front: list[Point] = []
    for point in sorted(points, key=lambda p: (-p.row.tokens_per_second, -p.accuracy)):
        if not front or point.accuracy > front[-1].accuracy:
            front.append(point)
    return front


def failed(points: Sequence[Point], accuracy: float) -> list[Point]:
    """Those whose exact match is under nine tenths of this one, AR's for example."""
    least = KEPT_ACCURACY * accuracy - 1e-9  # 36 of 50 are nine tenths of 40, and as floats less
    return [point for point in points if point.accuracy < least]


def failure_region(points: Sequence[Point], accuracy: float) -> list[str]:
    """Where settings of a grid fail, for each window size where any does: which tau at which lambda."""
    lost = failed(points, accuracy)

    def values(name: str, among: Sequence[Point]) -> list[float]:
        return sorted({float(p.row.settings[name]) for p in among})

    lines = []
    for window in values("window_size", points):
        regions: dict[str, list[str]] = {}
        for penalty in values("distance_penalty", points):
            at = {"window_size": window, "distance_penalty": penalty}
            here, failing = ([p for p in some if at.items() <= p.row.settings.items()] for some in (points, lost))
            where = _range_in_words(values("entropy_threshold", failing), values("entropy_threshold", here))
            regions.setdefault(where, []).append(f"{penalty:g}")
        regions.pop("", None)
        if regions:
            all_over = set(regions) == {"every tau"} and len(regions["every tau"]) == len(
                values("distance_penalty", points)
            )
            named = "; ".join(f"{where} at lambda {', '.join(at)}" for where, at in regions.items())
            named = "every tau and lambda" if all_over else named
            lines.append(f"W = {window:g}: {named}")
    return lines


def _range_in_words(failing: list[float], thresholds: list[float]) -> str:
    if not failing:
        return ""
    if failing == thresholds:
        return "every tau"
    if failing == thresholds[-len(failing) :]:
        return f"tau {'=' if len(failing) == 1 else '>='} {failing[0]:g}"
    return f"tau = {', '.join(f'{tau:g}' for tau in failing)}"


def rank_correlations(points: Sequence[Point]) -> dict[str, float]:
    """Spearman's rho of tokens per second with each measure, over the settings that have it; NaN where one does not vary."""

    def rho(name: str) -> float:
        pairs = [(point.row.tokens_per_second, point.measures[name]) for point in points]
        known = [(speed, value) for speed, value in pairs if not math.isnan(value)]
        speeds, values = ([pair[i] for pair in known] for i in (0, 1))
        return float(spearmanr(speeds, values).statistic) if len(set(values)) > 1 < len(set(speeds)) else math.nan

    return {name: rho(name) for name in points[0].measures}
