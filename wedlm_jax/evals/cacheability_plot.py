"""p_cache and what decides it as a picture: a line of panels for each task, a bar for each setting."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from wedlm_jax.evals.plots import CHARACTERS_OF_A_PANEL, COLOURS
from wedlm_jax.evals.tradeoff import Point
from wedlm_jax.results import put_title


def plot_cacheability(points_of: Mapping[str, Sequence[Point]], title: str) -> Figure:
    """From the points of every task."""
    longest = max(map(len, points_of.values()))
    room = 1.18  # for the number behind the longest bar
    # Streaming stays at or below 0.5, but block-wise may go up to 1.
    ends = max(0.6, *(room * p.row.p_cache for points in points_of.values() for p in points))
    size = 14, 1.0 + len(points_of) * (0.9 + 0.27 * longest)
    figure = Figure(size, dpi=110)
    grid = figure.subplots(len(points_of), 4, squeeze=False, sharey="row", sharex="col")
    for line, (task, points) in zip(grid, points_of.items(), strict=True):
        panels = {
            "p_cache (Eq. 4)": [p.row.p_cache for p in points],
            "commit rate": [p.order.commit_rate for p in points],
            "out of order": [p.order.out_of_order for p in points],
            "exact match": [p.accuracy for p in points],
        }
        labels = [p.row.label for p in points]
        for axes, (name, values) in zip(line, panels.items(), strict=True):
            bars = axes.barh(labels, values, color=[COLOURS[p.row.settings["decoder"]] for p in points])
            axes.bar_label(bars, fmt="{:.2f}", padding=2, fontsize=8)
            axes.set_xlim(0, ends if name == "p_cache (Eq. 4)" else room)
            axes.grid(axis="x", color="#e4e4e4")
            axes.set_axisbelow(True)
            title_of = textwrap.fill(f"{task.replace('_', ' ')}: {name}", CHARACTERS_OF_A_PANEL)
            axes.set_title(title_of, fontsize=10, parse_math=False)
        line[0].invert_yaxis()
        line[0].margins(x=0.2)
    put_title(figure, title)
    figure.tight_layout()
    return figure
