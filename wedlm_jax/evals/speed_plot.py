"""The speeds as a picture: tokens per second over AR's, by batch, a panel for each task and pair of lengths."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from matplotlib.figure import Figure

from wedlm_jax.evals import plots
from wedlm_jax.evals.speed import Speed
from wedlm_jax.results import CHARACTERS_PER_INCH

MARKERS = plots.MARKERS | {"transformers": "x", "vllm": "+"}
COLOURS = plots.COLOURS | {"transformers": "#9c755f", "vllm": "#edc948"}
LEGEND_ENTRY = 1.3  # inches that the longest name takes in the legend


def plot_speeds(speeds: Sequence[Speed], title: str) -> Figure:
    """A line of panels for each task, a column for each pair of prompt and output length."""
    tasks = list(dict.fromkeys(s.work.task for s in speeds))
    lengths = list(dict.fromkeys(_lengths(s) for s in speeds))
    decoders = [d for d in dict.fromkeys(s.decoder for s in speeds) if d != "ar"]
    width = 3.4 * len(lengths) + 0.6
    title = textwrap.fill(title, int(CHARACTERS_PER_INCH * width))
    columns = min(1 + len(decoders), int(width / LEGEND_ENTRY))
    above, below = 0.3 * len(title.splitlines()), 0.1 + 0.25 * -(-(1 + len(decoders)) // columns)
    size = width, 2.9 * len(tasks) + above + below
    figure = Figure(size, dpi=110)
    grid = figure.subplots(len(tasks), len(lengths), squeeze=False, sharex=True)
    for line, task in zip(grid, tasks, strict=True):
        for axes, (prompt, output) in zip(line, lengths, strict=True):
            here = [s for s in speeds if (s.work.task, *_lengths(s)) == (task, prompt, output)]
            for decoder in decoders:
                of_decoder = sorted((s for s in here if s.decoder == decoder), key=lambda s: s.work.batch)
                axes.plot(
                    [s.work.batch for s in of_decoder],
                    [s.speedup_over_ar for s in of_decoder],
                    marker=MARKERS[decoder],
                    color=COLOURS[decoder],
                    label=decoder,
                )
            axes.axhline(1.0, color=COLOURS["ar"], linewidth=1, linestyle="--", label="AR")
            axes.set_xscale("log", base=2)
            axes.set_ylim(bottom=0)
            axes.set_title(f"{task.replace('_', ' ')}, {prompt or 'one problem'} + {output} tokens", fontsize=8)
            axes.grid(color="#e4e4e4")
            axes.set_axisbelow(True)
        line[0].set_ylabel("tokens/s over AR's")
    for axes in grid[-1]:
        axes.set_xlabel("batch")
    handles, names = grid[0, 0].get_legend_handles_labels()
    figure.suptitle(title, fontsize=12, parse_math=False)
    figure.legend(handles, names, loc="lower center", ncol=columns, frameon=False)
    figure.tight_layout(rect=(0, below / size[1], 1, 1))
    return figure


def _lengths(speed: Speed) -> tuple[int, int]:
    """Of prompt and output; 0 for a problem alone, whose length is the task's."""
    return 0 if speed.work.alone else speed.work.prompt_tokens, speed.work.output_tokens
