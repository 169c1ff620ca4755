"""A study's results as a table and as a picture."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Mapping
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from wedlm_jax.results import put_title
from wedlm_jax.study.design import Study

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def as_table(study: Study, values: Mapping[str, Mapping[str, list[float]]]) -> Table:
    table = Table(title=f"{escape(study.name)}: mean of the training seeds (n = {len(study.seeds)}), and their range")
    table.add_column("arm")
    for measure in study.measures:
        table.add_column(escape(measure.label), justify="right")
    for arm, by_measure in values.items():
        cells = [by_measure[measure.label] for measure in study.measures]
        table.add_row(escape(arm), *map(_mean_and_range, cells))
    return table


def _mean_and_range(values: list[float]) -> str:
    mean = f"{statistics.fmean(values):.3f}"
    return mean if len(values) == 1 else f"{mean} ({min(values):.3f} to {max(values):.3f})"


def plot(
    study: Study,
    values: Mapping[str, Mapping[str, list[float]]],
    curves: Mapping[str, Mapping[str, list[list[float]]]],
) -> Figure:
    """A panel for each measure, a line for each arm: every seed is a dot, their mean a bar, a threshold a dashed line; then a
    panel for each curve, in the colours of the arms."""
    from matplotlib import colormaps  # here, because every experiment imports this module and none of them draws
    from matplotlib.figure import Figure

    arms = list(values)
    colours = dict(zip(arms, colormaps["turbo"]([(i + 0.5) / len(arms) for i in range(len(arms))]), strict=True))
    colour = {arm: colours[arm] if study.curves else "#4e79a7" for arm in arms}
    count = len(study.measures)
    widths = [3.0] * count + [5.0] * len(study.curves)
    figure = Figure((2 + sum(widths), (3.0 if study.curves else 1.2) + 0.42 * len(arms)), dpi=110)
    (panels,) = figure.subplots(1, len(widths), squeeze=False, width_ratios=widths)
    for axes, measure in zip(panels[:count], study.measures, strict=True):
        for place, arm in enumerate(arms):
            seeds = values[arm][measure.label]
            axes.plot(seeds, [place] * len(seeds), "o", color=colour[arm], alpha=0.7)
            axes.plot([statistics.fmean(seeds)], [place], "|", color="#d1603d", markersize=18, markeredgewidth=2.5)
        if measure.threshold is not None:
            axes.axvline(measure.threshold, linestyle="--", color="#6b6b6b")
        axes.set_xlabel(textwrap.fill(measure.label, 30))
        axes.grid(axis="x", color="#e4e4e4")
        axes.set_yticks(range(len(arms)), arms if axes is panels[0] else [""] * len(arms))
        axes.set_ylim(len(arms) - 0.5, -0.5)
    for axes, curve in zip(panels[count:], study.curves, strict=True):
        for arm in arms:
            mean = curve.mean(curves[arm][curve.label])
            axes.plot(range(1, len(mean) + 1), mean, ".-", color=colour[arm], label=arm)
        axes.set(xlabel=curve.x_label, title=curve.label)
        axes.grid(color="#e4e4e4")
        axes.legend(fontsize="x-small")
    put_title(figure, f"{study.name}: a dot for each training seed (n = {len(study.seeds)}), the bar is their mean")
    figure.tight_layout()
    return figure
