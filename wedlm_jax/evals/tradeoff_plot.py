"""The trade-off as a picture: exact match against speed with its Pareto front, and maps over tau and lambda."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from wedlm_jax.evals.plots import COLOURS
from wedlm_jax.evals.sweep import Row
from wedlm_jax.evals.tradeoff import Point, pareto_front
from wedlm_jax.results import put_title


def plot_tradeoff(ar: Row, points: Sequence[Point], title: str) -> Figure:
    """A line of three panels for each window size."""
    windows = list(dict.fromkeys(p.row.settings["window_size"] for p in points))
    figure = Figure((15, 4.4 * len(windows)), dpi=110)
    grid = figure.subplots(len(windows), 3, squeeze=False)
    for line, window in zip(grid, windows, strict=True):
        here = [p for p in points if p.row.settings["window_size"] == window]
        _scatter(line[0], ar, here)
        line[0].set_title(f"W = {window}")
        _map(line[1], here, [p.accuracy for p in here], "exact match", "{:.0%}")
        _map(line[2], here, [p.row.tokens_per_forward for p in here], "tokens per forward", "{:.1f}")
    put_title(figure, title)
    figure.tight_layout()
    return figure


def _scatter(axes: Axes, ar: Row, points: Sequence[Point]) -> None:
    front = pareto_front(points) if ar.accuracy else []  # where nothing is right the fastest is no better
    colour = COLOURS["streaming"]
    axes.plot([p.row.tokens_per_second for p in points], [p.accuracy for p in points], "o", color=colour, alpha=0.35)
    axes.plot(
        [p.row.tokens_per_second for p in front],
        [p.accuracy for p in front],
        "o-",
        color=COLOURS["verified"],
        label="Pareto front",
    )
    assert ar.accuracy is not None
    axes.plot(ar.tokens_per_second, ar.accuracy, "*", color=COLOURS["ar"], markersize=13, label="AR")
    axes.set_xlabel(f"tokens per second (batch of {ar.batch_size})")
    axes.set_ylabel(f"exact match (n = {ar.n})")
    axes.set_ylim(-0.04, 1.06)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.grid(color="#e4e4e4")
    axes.set_axisbelow(True)
    axes.legend(frameon=False)


def _map(axes: Axes, points: Sequence[Point], values: Sequence[float], title: str, form: str) -> None:
    thresholds = list(dict.fromkeys(p.row.settings["entropy_threshold"] for p in points))
    penalties = list(dict.fromkeys(p.row.settings["distance_penalty"] for p in points))
    cells = np.array(values).reshape(len(thresholds), len(penalties))  # in the order of `tradeoff.grid`
    axes.imshow(cells, aspect="auto", cmap="cividis")
    middle = (cells.min() + cells.max()) / 2
    for (i, j), value in np.ndenumerate(cells):
        axes.text(j, i, form.format(value), ha="center", va="center", color="black" if value > middle else "white")
    axes.set_xticks(range(len(penalties)), [f"{p:g}" for p in penalties])
    axes.set_yticks(range(len(thresholds)), [str(t) for t in thresholds])
    axes.set_xlabel("lambda, nats per slot")
    axes.set_ylabel("tau, nats")
    axes.set_title(title)
