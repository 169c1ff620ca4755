"""For the terminal: the results table, and one decode whose tokens are coloured by the forward that filled them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from matplotlib import colormaps
from rich.table import Table
from rich.text import Text

from wedlm_jax.decode.stats import Completion
from wedlm_jax.evals.sweep import Row

P_CACHE_NOTE = (
    "p_cache (Eq. 4): generated tokens over token instances processed. It counts a token once as a mask and once as itself, "
    "so streaming stays at or below 0.5; AR feeds every token once, which is 1."
)


def results_table(rows: Sequence[Row], title: str) -> Table:
    """One line a row, task by task."""
    table = Table(title=title, caption=P_CACHE_NOTE, caption_justify="left", title_justify="left")
    table.add_column("task", no_wrap=True)
    table.add_column("decoder", no_wrap=True)
    for name in ("exact match", "95 %", "n", "tokens/forward", "p_cache", "tokens/s", "vs AR", "same as AR"):
        table.add_column(name, justify="right", no_wrap=name != "tokens/forward")
    for task, group in itertools.groupby(rows, key=lambda row: row.task):
        for i, row in enumerate(group):
            table.add_row(
                task if i == 0 else "",
                row.label,
                "" if row.accuracy is None else f"{row.accuracy:.1%}",
                "" if row.low is None else f"{100 * row.low:.0f}-{100 * row.high:.0f}",  # type: ignore[operator]
                str(row.n),
                f"{row.tokens_per_forward:.2f}",
                f"{row.p_cache:.2f}",
                f"{row.tokens_per_second:.0f}",
                "" if row.speedup_over_ar is None else f"{row.speedup_over_ar:.2f}x",
                "" if row.equal_to_ar is None or row.settings["decoder"] == "ar" else f"{row.equal_to_ar}/{row.n}",
            )
        table.add_section()
    return table


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
        for _ in range(entry["emitted"]):
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
