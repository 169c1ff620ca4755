"""The results as a picture: exact match against tokens per forward and against tokens per second."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from wedlm_jax.evals.sweep import BASE, Row
from wedlm_jax.results import put_title

MARKERS = {"ar": "o", "lookup": "D", "blockwise": "s", "streaming": "^", "verified": "*"}
COLOURS = {"ar": "#444444", "lookup": "#59a14f", "blockwise": "#b07aa1", "streaming": "#4e79a7", "verified": "#d1603d"}
CHARACTERS_OF_A_PANEL = 42  # of its title's


def plot_results(rows: Sequence[Row], title: str) -> Figure:
    """One column of panels for each task with answers, of which there is one; error bars are 95 % Wilson intervals. Marks of the
    base, and of masks left in their places, are hollow."""
    rows = [row for row in rows if row.accuracy is not None]
    tasks = list(dict.fromkeys(row.task for row in rows))
    figure = Figure((4.6 * len(tasks), 8.4), dpi=110)
    grid = figure.subplots(2, len(tasks), squeeze=False, sharey="row")
    for column, task in enumerate(tasks):
        of_task = [row for row in rows if row.task == task]
        for axes, quantity in zip(grid[:, column], ("tokens_per_forward", "tokens_per_second"), strict=True):
            _panel(axes, of_task, quantity)
        name = textwrap.fill(f"{task.replace('_', ' ')} (n = {of_task[0].n})", CHARACTERS_OF_A_PANEL)
        grid[0, column].set_title(name, parse_math=False)
        grid[0, column].set_xlabel("tokens per forward")
        grid[1, column].set_xlabel(f"tokens per second (batch of {of_task[0].batch_size})")
    for line in grid:
        line[0].set_ylabel("exact match, 95 % interval")
    handles, names = grid[0, 0].get_legend_handles_labels()
    put_title(figure, title)
    figure.legend(handles, names, loc="lower center", ncol=min(len(names), 4), frameon=False)
    figure.tight_layout(rect=(0, 0.03 + 0.03 * -(-len(names) // 4), 1, 0.98))
    return figure


def opacity(row: Row, rows: Sequence[Row]) -> float:
    """Of a row's mark beside those of `rows`: the lower the tau of streaming, or the narrower verified's window, the lighter."""
    decoder = row.settings["decoder"]
    if decoder not in ("streaming", "verified"):
        return 1.0
    name = "entropy_threshold" if decoder == "streaming" else "window_size"
    values = {other.settings[name] for other in rows if other.settings["decoder"] == decoder}
    if len(values) == 1:
        return 1.0
    return 0.35 + 0.65 * (1 + sorted(values, key=float).index(row.settings[name])) / len(values)  # "inf" is a tau too


def _panel(axes: Axes, rows: Sequence[Row], quantity: str) -> None:
    for row in rows:
        decoder = row.settings["decoder"]
        hollow = row.weights == BASE or row.settings.get("reorder") is False
        x, y = getattr(row, quantity), row.accuracy
        assert y is not None and row.low is not None and row.high is not None
        error = [[max(y - row.low, 0)], [max(row.high - y, 0)]]
        axes.errorbar(
            x,
            y,
            yerr=error,
            fmt=MARKERS[decoder],
            color=COLOURS[decoder],
            alpha=opacity(row, rows),
            markersize=13 if decoder == "verified" or row.weights == BASE else 8,
            markerfacecolor="white" if hollow else COLOURS[decoder],
            capsize=3,
            label=row.label,
        )
    axes.set_xlim(0, 1.12 * max(getattr(row, quantity) for row in rows))
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.set_ylim(-0.04, 1.06)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.grid(color="#e4e4e4")
    axes.set_axisbelow(True)
