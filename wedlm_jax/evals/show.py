"""For the terminal: the results table, and one decode whose tokens are coloured by the forward that filled them."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Sequence
from typing import Any

import jax
from matplotlib import colormaps
from rich import box
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from wedlm_jax.decode.stats import Completion
from wedlm_jax.evals.sweep import Row
from wedlm_jax.evals.tradeoff import Point
from wedlm_jax.model.config import ModelConfig
from wedlm_jax.sharding import ONE_DEVICE, MeshConfig, mesh_of_first
from wedlm_jax.version import __version__

P_CACHE_NOTE = (
    "p_cache (Eq. 4): generated tokens over token instances processed. It counts a token once as a mask and once as itself, "
    "so streaming stays at or below 0.5, but for the AR tokens of verify=fallback; block-wise may pass it, as its last block is "
    "never fed again; AR feeds every token once, which is 1."
)


def results_table(rows: Sequence[Row], title: str) -> Table:
    """One line a row, under a line for each task; fits 80 columns."""
    table = Table(
        title=escape(title), title_justify="left", caption=P_CACHE_NOTE, caption_justify="left", box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0), pad_edge=False,
    )  # fmt: skip
    table.add_column("decoder", no_wrap=True)
    for name in ("exact match\n(95 %)", "tokens/\nforward", "p_cache", "tokens/s", "speed\nvs AR", "same\nas AR"):
        table.add_column(name, justify="right", no_wrap=True)
    for task, group in itertools.groupby(rows, key=lambda row: row.task):
        members = list(group)
        table.add_row(f"[bold]{escape(task)}[/bold]", f"n = {members[0].n}")
        for row in members:
            table.add_row(f" {row.label}", *_cells(row))
        table.add_section()
    return table


def points_table(ar: Row, points: Sequence[Point], title: str, starred: Sequence[Point] = ()) -> Table:
    """AR, then settings, with the order in which they fill masks; fits 80 columns."""
    table = Table(title=escape(title), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("setting", no_wrap=True)
    for name in ("exact\nmatch", "tokens/s", "tokens/\nforward", "p_cache", "commit\nrate", "out of\norder"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_row("AR", f"{ar.accuracy:.0%}", f"{ar.tokens_per_second:,.0f}", "1.00", "1.00", "-", "-")
    for point in points:
        row, shares = point.row, (point.order.commit_rate, point.order.out_of_order)
        table.add_row(
            f"{row.label}{' *' if point in starred else ''}", f"{point.accuracy:.0%}", f"{row.tokens_per_second:,.0f}",
            f"{row.tokens_per_forward:.2f}", f"{row.p_cache:.2f}",
            *("-" if math.isnan(share) else f"{share:.2f}" for share in shares),
        )  # fmt: skip
    return table


def cut_short(rows: Sequence[Row]) -> list[str]:
    """A line for each task with answers where completions of AR were cut: that may cost answers, not only speed."""
    cut = [row for row in rows if row.accuracy is not None and row.unfinished and row.settings["decoder"] == "ar"]
    lines = []
    for task, group in itertools.groupby(cut, key=lambda row: row.task):
        members = list(group)
        counts = " and ".join(f"{row.unfinished} ({row.label})" for row in members)
        length = members[0].settings["max_new_tokens"]
        of = f"{task}: of {members[0].n} completions {counts} were cut at max_new_tokens={length}"
        lines.append(f"{of}; raise it where answers come later")
    return lines


def _cells(row: Row) -> tuple[str, ...]:
    match = "-"
    if row.accuracy is not None and row.low is not None and row.high is not None:
        match = f"{100 * row.accuracy:.0f} ({100 * row.low:.0f}-{100 * row.high:.0f})"
    same = row.equal_to_ar is not None and row.settings["decoder"] != "ar"
    return (
        match,
        f"{row.tokens_per_forward:.2f}",
        f"{row.p_cache:.2f}",
        f"{row.tokens_per_second:.0f}",
        "-" if row.speedup_over_ar is None else f"{row.speedup_over_ar:.2f}x",
        f"{row.equal_to_ar}/{row.n}" if same else "-",
    )


def device(config: MeshConfig = ONE_DEVICE) -> str:
    """What the decoding ran on: the first device, or those of a mesh."""
    first, mesh = jax.devices()[0], mesh_of_first(config)
    kind = f"CPU with {os.cpu_count()} cores" if first.platform == "cpu" else first.device_kind
    if mesh is None:
        return kind
    return f"{mesh.size} x {kind} ({', '.join(f'{name} {size}' for name, size in mesh.shape.items() if size > 1)})"


def ran(config: ModelConfig, mesh: MeshConfig = ONE_DEVICE) -> dict[str, Any]:
    """For a file of results: what the decoding ran on, and in which numbers."""
    return {
        "device": device(mesh), "dtype": config.dtype, "kernel_dtype": config.kernel_dtype or config.dtype,
        "versions": {"jax": jax.__version__, "wedlm_jax": __version__},
    }  # fmt: skip


def filling_steps(completion: Completion, prompt_length: int) -> list[int]:
    """For each generated token, the number of the forward (from 1) whose logits it comes from.

    A draft that a verified decoder rejects and re-fills counts from its last filling; an AR token that replaces one counts
    from the forward that emitted it.

    Args:
      completion: one that was generated with `trace=True`.
      prompt_length: tokens of its prompt.
    """
    steps: list[int] = []
    filled: dict[int, tuple[int, int]] = {}  # position -> (token, forward)
    for forward, entry in enumerate(completion.trace or (), start=1):
        for position in entry["mask_positions"]:
            filled.pop(position, None)
        fillings = zip(entry["filled_positions"], entry["filled_tokens"], strict=True)
        filled.update({position: (token, forward) for position, token in fillings})
        # A stop string may cut a run short that was emitted whole.
        for _ in range(min(entry["emitted"], len(completion.ids) - len(steps))):
            token, origin = filled.get(prompt_length + len(steps), (None, forward))
            steps.append(origin if token == completion.ids[len(steps)] else forward)
    return steps


def coloured_by_step(pieces: Sequence[str], steps: Sequence[int], *, colour: bool) -> Text:
    """The text of a completion, each token coloured by its forward, with a legend.

    Args:
      pieces: the text of each token.
      steps: the forward that filled it, from 1.
      colour: False marks tokens by number instead: every run of one forward is written `n[...]`.
    """
    last = max(steps, default=1)
    text = Text()
    for step, run in itertools.groupby(zip(steps, pieces, strict=True), key=lambda pair: pair[0]):
        piece = "".join(piece for _, piece in run)
        if colour:
            text.append(piece, style=_style(step, last))
        else:
            text.append(f"{step}[{piece}]")
    text.append("\nforward: ")
    if not colour:
        return text.append(f"the number before each bracket, 1 to {last}")
    for step in range(1, last + 1):
        text.append(f" {step} ", style=_style(step, last))
    return text


def _style(step: int, last: int) -> str:
    """Dark violet for the first forward to yellow for the last, black or white on it, whichever reads better."""
    red, green, blue = (round(255 * x) for x in colormaps["viridis"]((step - 1) / max(last - 1, 1))[:3])
    bright = 0.299 * red + 0.587 * green + 0.114 * blue > 128
    return f"{'black' if bright else 'white'} on #{red:02x}{green:02x}{blue:02x}"
