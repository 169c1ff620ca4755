"""The speeds on the terminal: a table of each piece of work, and in words where AR wins and where rows ended early."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich import box
from rich.table import Table

from wedlm_jax.evals.speed import Speed, Work


def speed_table(speeds: Sequence[Speed]) -> Table:
    """The decoders on one piece of work; fits 80 columns."""
    shown = Table(title=str(speeds[0].work), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    shown.add_column("decoder", no_wrap=True)
    columns = "tokens\n/s", "vs AR", "first\nms", "tokens/\nforward", "p_cache", "forward\nms", "roofline\nms", "as\nAR"
    for name in columns:
        shown.add_column(name, justify="right", no_wrap=True)
    for speed in speeds:
        shown.add_row(
            speed.decoder, f"{speed.tokens_per_second:,.0f}", f"{speed.speedup_over_ar:.2f}x",
            _short(1e3 * speed.first_token_seconds), f"{speed.tokens_per_forward:.2f}", f"{speed.p_cache:.2f}",
            "-" if math.isnan(speed.forward_milliseconds) else _short(speed.forward_milliseconds),
            _short(speed.roofline_milliseconds), f"{speed.equal_to_ar}/{speed.work.batch}",
        )  # fmt: skip
    return shown


def _short(milliseconds: float) -> str:
    return f"{milliseconds:.2f}" if milliseconds < 10 else f"{milliseconds:.0f}"


def where_ar_wins(speeds: Sequence[Speed]) -> list[str]:
    """One line for each decoder that is slower than AR somewhere."""
    slower: dict[str, list[Speed]] = {}
    for speed in speeds:
        if speed.decoder != "ar" and speed.speedup_over_ar < 1:
            slower.setdefault(speed.decoder, []).append(speed)
    return [
        f"AR is faster than {decoder} on: {'; '.join(f'{s.work} ({s.speedup_over_ar:.2f}x)' for s in found)}."
        for decoder, found in slower.items()
    ]


def where_rows_ended_early(speeds: Sequence[Speed]) -> list[str]:
    """One line about the work of which some decoder returned less than was asked for, if there is any."""
    least: dict[Work, float] = {}
    for speed in speeds:
        of_row = speed.generated_tokens / speed.work.batch
        least[speed.work] = min(of_row, least.get(speed.work, of_row))
    ended = [f"{work} (down to {tokens:.1f} a row)" for work, tokens in least.items() if tokens < work.output_tokens]
    return [f"Ended sooner: {'; '.join(ended)}. --ignore-end decodes on behind an end token."] if ended else []
