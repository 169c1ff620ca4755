"""Open-ended generation as a picture: speed by entropy of the prompt, and what the texts lose by it."""

from __future__ import annotations

from matplotlib.figure import Figure

from wedlm_jax.evals.open_ended import OpenEnded
from wedlm_jax.evals.plots import COLOURS, MARKERS, opacity
from wedlm_jax.results import put_title


def plot_open_ended(found: OpenEnded, title: str) -> Figure:
    figure = Figure((18, 4.6), dpi=110)
    panels = figure.subplots(1, 4)
    levels = list(found.bounds)
    names = [f"{level}\n{low:.2f} to {high:.2f}" for level, (low, high) in found.bounds.items()]
    for measures in found.measures:
        rows = {row.task: row for row in found.rows if row.label == measures.label}
        row = rows[levels[0]]
        decoder, alpha = row.settings["decoder"], opacity(row, found.rows)
        style = dict(color=COLOURS[decoder], marker=MARKERS[decoder], label=measures.label, alpha=alpha)
        panels[0].plot(names, [rows[level].tokens_per_forward for level in levels], **style)
        panels[1].plot(names, [rows[level].tokens_per_second for level in levels], **style)
        panels[2].plot(measures.tokens_per_forward, measures.perplexity, linestyle="", markersize=10, **style)
        panels[3].plot(measures.repetition, measures.distinct[2], linestyle="", markersize=10, **style)
    for axes, (x, y) in zip(
        panels,
        (
            ("mean entropy of the prompt, nats", "tokens per forward"),
            ("mean entropy of the prompt, nats", "tokens per second"),
            ("tokens per forward", "AR perplexity of the text"),
            ("repetition (share of 4-grams)", "distinct-2"),
        ),
        strict=True,
    ):
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        axes.grid(color="#e4e4e4")
        axes.set_axisbelow(True)
    for axes in panels[:2]:
        axes.set_ylim(bottom=0)
    handles, labels = panels[0].get_legend_handles_labels()
    put_title(figure, title)
    figure.legend(handles, labels, loc="lower center", ncol=len(labels), frameon=False)
    figure.tight_layout(rect=(0, 0.07, 1, 0.99))
    return figure
