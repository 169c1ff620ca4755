"""For the terminal: tables of results, the bar beside which they are measured, and on what."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table
from scipy.stats import binomtest

from wedlm_jax.evals.sweep import OnBatch, Row, Setting
from wedlm_jax.evals.tasks import Task
from wedlm_jax.evals.tradeoff import Point
from wedlm_jax.model.config import ModelConfig
from wedlm_jax.sharding import ONE_DEVICE, MeshConfig, mesh_of_first
from wedlm_jax.version import __version__

P_CACHE_NOTE = (
    "p_cache (Eq. 4): generated tokens over token instances processed. It counts a token once as a mask and once as itself, "
    "so streaming stays at or below 0.5, but for the AR tokens of verify=fallback; block-wise may pass it, as its last block is "
    "never fed again; AR feeds every token once, which is 1."
)


@contextlib.contextmanager
def bar_of(completions: int) -> Iterator[tuple[OnBatch, Console]]:
    """A bar on stderr while so many completions are decoded.

    Yields:
      what a batch that is done is told to, as `on_batch` of a sweep; and a console for lines above the bar.
    """
    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("", total=completions)

        def on_batch(setting: Setting, task: Task, done: Sequence[object]) -> None:
            progress.update(bar, advance=len(done), description=escape(f"{task.name}: {setting.label}"))

        yield on_batch, progress.console


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


def gained_and_lost(rows: Sequence[Row]) -> list[str]:
    """A line for each task with the settings that answer other questions rightly than AR (AR of the adapted weights: than the
    base's): on the same questions that tells apart what intervals may not. p is of the exact sign test (McNemar's)."""
    lines = []
    for task, group in itertools.groupby(rows, key=lambda row: row.task):
        told = [
            f"{row.label} +{row.gained} -{row.lost} (p = {binomtest(row.gained, row.gained + row.lost).pvalue:.2g})"
            for row in group
            if row.gained is not None and row.lost is not None and row.gained + row.lost
        ]
        if told:
            lines.append(f"{task}: answers gained and lost beside AR: {'; '.join(told)}")
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
