"""The curves of one or several runs as a picture."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

Lines = Sequence[Mapping[str, Any]]  # the logged steps of a run

_HELD_OUT = ", held out dashed"  # left out of a title where no run has such a curve
# Title -> metrics of a panel; the first is drawn solid, the others dashed, dotted, ...
PANELS: dict[str, tuple[str, ...]] = {
    "loss": ("loss",),
    f"AR loss{_HELD_OUT}": ("ar_loss", "validation_ar_loss"),
    f"MLM loss{_HELD_OUT}": ("mlm_loss", "validation_mlm_loss"),
    "MLM loss by mask ratio (up to)": ("mlm_loss_0.25", "mlm_loss_0.50", "mlm_loss_0.75", "mlm_loss_1.00"),
    "distillation loss": ("distillation_loss",),
    "distillation loss by mask ratio (up to)": (
        "distillation_loss_0.25", "distillation_loss_0.50", "distillation_loss_0.75", "distillation_loss_1.00",
    ),
    "gradient norm": ("grad_norm",),
    "learning rate": ("learning_rate",),
    "padding share": ("padding_share",),
    "skipped records": ("skipped_records",),
    "tokens per second": ("tokens_per_second",),
    "MFU": ("mfu",),
}  # fmt: skip
_STYLES = ("-", "--", ":", "-.")
_LOGARITHMIC = ("gradient norm",)


def draw_curves(runs: Mapping[str, Lines]) -> Figure:
    """A panel for each group of metrics that some run has, a colour for each run.

    Args:
      runs: the logged steps by the name of the run.
    """
    shown = {
        title: names
        for title, names in PANELS.items()
        if any(points(run, n)[0] for run in runs.values() for n in names)
    }
    columns = min(3, max(len(shown), 1))
    rows = max(math.ceil(len(shown) / columns), 1)
    figure = Figure((4.6 * columns, 3.1 * rows), dpi=130, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis in axes.flat[len(shown) :]:
        axis.remove()
    for axis, (title, names) in zip(axes.flat, shown.items(), strict=False):
        for number, (label, run) in enumerate(runs.items()):
            first = next((name for name in names if points(run, name)[0]), None)
            for name, style in zip(names, _STYLES, strict=False):
                steps, values = points(run, name)
                if steps:
                    both = f"{label} {name.rpartition('_')[2]}" if len(names) > 2 else label if name == first else None
                    marker = "." if sum(map(math.isfinite, values)) == 1 else None  # a line of one point is none
                    axis.plot(steps, values, style, color=f"C{number}", label=both, linewidth=1.2, marker=marker)
        some_held_out = any(points(run, name)[0] for run in runs.values() for name in names[1:])
        axis.set_title(title if some_held_out else title.removesuffix(_HELD_OUT), fontsize=10)
        axis.set_xlabel("step", fontsize=8)
        axis.tick_params(labelsize=8)
        axis.grid(alpha=0.3)
        if title in _LOGARITHMIC:
            axis.set_yscale("log")
        if len(runs) > 1 or len(names) > 2:
            axis.legend(fontsize=7)
    return figure


def points(run: Lines, name: str) -> tuple[list[int], list[float]]:
    """Steps and values of a metric, where it was measured; NaN, a gap in the curve, where it was not finite."""
    pairs = [(line["step"], line[name]) for line in run if name in line]
    values = [math.nan if value is None else value for _, value in pairs]
    return ([step for step, _ in pairs], values) if any(map(math.isfinite, values)) else ([], [])
