"""What a completion returns, with one definition of its counters for every decoder."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

FinishReason = Literal["stop", "length", "cancelled"]  # only an engine cancels


@dataclasses.dataclass(frozen=True)
class Stats:
    """Counters of one row.

    Streaming and block-wise prefill the whole prompt; of AR, verified, lookup and the fallback mode the first forward feeds its
    last token, so that AR is exactly 1 in both ratios. Verified lets its first masks ride in prefill, so that its first forward
    checks drafts already: the masks of its window count as processed. Streaming feeds every token at least twice, as a
    mask and as itself, so its p_cache stays at or below 1/2; the fallback mode's AR tokens are fed as themselves alone.
    """

    generated_tokens: int  # up to and with the first stop id
    forwards: int  # decode forwards that the row took part in, prefill not counted
    tokens_processed: int  # token instances in those forwards, and masks in prefill; no static padding

    @property
    def p_cache(self) -> float:
        """Eq. 4: generated tokens over token instances processed."""
        return self.generated_tokens / max(self.tokens_processed, 1)

    @property
    def tokens_per_forward(self) -> float:
        return self.generated_tokens / max(self.forwards, 1)

    def as_dict(self) -> dict[str, float]:
        ratios = {"p_cache": self.p_cache, "tokens_per_forward": self.tokens_per_forward}
        return {**dataclasses.asdict(self), **ratios}


@dataclasses.dataclass(frozen=True)
class Completion:
    """The tokens that follow one prompt."""

    ids: list[int]  # with the stop id, where one ended it
    finish_reason: FinishReason
    stats: Stats
    text: str | None = None  # without the stop id or stop string; None without a tokenizer
    # Of the AR model in nats, unfiltered and at temperature 1, for each of the ids: of AR, verified and lookup, and of the AR
    # tokens of verify="fallback", None of its others. Floats of another batch differ in their last bits, so these two do not
    # count where completions are compared.
    log_probs: list[float | None] | None = dataclasses.field(default=None, compare=False)
    # Of verified and lookup, by distance from the newest token, 1 slot first: drafts checked, and agreed with AR.
    acceptance: list[tuple[int, int]] | None = dataclasses.field(default=None, compare=False)
    trace: list[dict[str, Any]] | None = None  # one entry a forward, where asked for: see decode/trace.py
