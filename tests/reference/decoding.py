"""Every decoder, slowly: one row, plain lists, and a full recomputation of the sequence in float64 at every forward.

Written from the paper (section 5, Algorithm 1, Eq. 5 to 7 and 11) and from the documented semantics of each decoder. A window
is a list of tokens in logical order, None where there is a mask.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable

import numpy as np

from .transformer import ReferenceTransformer

PROBABILITY_SLACK = 1e-4  # a top-p limit is a close call where moving it by this much changes the drawn token


@dataclasses.dataclass
class Row:
    """One row on its way: what it has produced, what that cost, and how close its closest decision was."""

    model: ReferenceTransformer
    config: object  # has the fields of DecodeConfig, with stop_ids and mask_token_id resolved
    noise: Callable[[int], np.ndarray]  # absolute position -> Gumbel noise [V]
    prompt: list[int]
    context: list[int]  # tokens before the window
    emitted: list[int] = dataclasses.field(default_factory=list)
    finish: str | None = None
    forwards: int = 0
    processed: int = 0
    margin: float = math.inf

    def forward(self, window: list[int | None], in_prefill: bool = False) -> np.ndarray:
        """Logits [len(window), V] in logical order; the window is fed filled tokens first, masks last, positions kept, or as it
        stands without reordering."""
        base, slots = len(self.context), range(len(window))
        order = [i for i in slots if window[i] is not None] + [i for i in slots if window[i] is None]
        if not self.config.reorder:
            order = list(slots)
        fed = [self.config.mask_token_id if window[i] is None else window[i] for i in order]
        positions = [*range(base), *(base + i for i in order)]
        physical = self.model.logits(self.context + fed, positions)[base:]
        self.forwards += not in_prefill
        self.processed += window.count(None) if in_prefill else len(window)
        return physical[[order.index(i) for i in slots]]

    def emit(self, tokens: Iterable[int]) -> None:
        """Scanned in order: a stop id, or reaching max_new_tokens, ends the row and drops the rest."""
        for token in tokens:
            self.emitted.append(token)
            if token in self.config.stop_ids:
                self.finish = "stop"
            elif len(self.emitted) == self.config.max_new_tokens:
                self.finish = "length"
            if self.finish:
                return

    def pick(self, logits: np.ndarray, position: int) -> int:
        """The token that goes to `position`: top-k, then top-p, then temperature, then the position's noise."""
        c = self.config
        logits = {i: x for i, x in enumerate(logits) if not (c.ban_mask and i == c.mask_token_id)}
        if c.temperature == 0:
            return self._best(logits)
        kept = sorted(logits, key=lambda i: -logits[i])
        if 0 < c.top_k < len(kept):
            self.decide(logits[kept[c.top_k - 1]] - logits[kept[c.top_k]])
            kept = kept[: c.top_k]
        scores = {i: logits[i] / c.temperature + self.noise(position)[i] for i in kept}
        limits = [c.top_p] if c.top_p == 1 else [c.top_p - PROBABILITY_SLACK, c.top_p + PROBABILITY_SLACK, c.top_p]
        winners = [self._best({i: scores[i] for i in _nucleus(kept, logits, limit)}) for limit in limits]
        if len(set(winners)) > 1:
            self.decide(0)
        return winners[-1]

    def select_by_entropy(self, logits: np.ndarray, masks: list[int]) -> list[int]:
        """What the rule fills, or else the smallest adjusted entropy."""
        return self.passing(logits, masks) or self._smallest(self._adjusted(logits, masks))

    def passing(self, logits: np.ndarray, masks: list[int]) -> list[int]:
        """Adjusted entropies strictly below tau: each of them, the smallest ones summed up, or those before the first that is
        not."""
        c = self.config
        tau = -math.inf if c.entropy_threshold is None else c.entropy_threshold
        adjusted = self._adjusted(logits, masks)
        rule = ("run" if c.decoder == "verified" else "each") if c.fill_rule == "auto" else c.fill_rule
        filled, total = [], 0.0
        if rule == "sum":
            ranked = sorted(masks, key=lambda i: adjusted[i])
            self.decide(*(adjusted[b] - adjusted[a] for a, b in itertools.pairwise(ranked)))
            for i in ranked:
                total += adjusted[i]
                self.decide(abs(total - tau))
                if total < tau:
                    filled.append(i)
            return filled
        self.decide(*(abs(x - tau) for x in adjusted.values()))
        for i in masks:
            if adjusted[i] < tau:
                filled.append(i)
            elif rule == "run":
                break
        return filled

    def _adjusted(self, logits: np.ndarray, masks: list[int]) -> dict[int, float]:
        penalty = 0.02 if self.config.distance_penalty == "auto" else self.config.distance_penalty
        return {i: _entropy(logits[i]) + penalty * (i - masks[0]) for i in masks}

    def select_by_confidence(self, logits: np.ndarray, masks: list[int]) -> list[int]:
        """At least as probable as the threshold, or else the most probable one; a threshold of 0 fills one a step."""
        threshold = self.config.confidence_threshold
        confidence = {i: max(_softmax(logits[i])) for i in masks}
        above = []
        if threshold > 0:
            self.decide(*(abs(x - threshold) for x in confidence.values()))
            above = [i for i in masks if confidence[i] >= threshold]
        return above or self._smallest({i: -x for i, x in confidence.items()})

    def decide(self, *margins: float) -> None:
        self.margin = min([self.margin, *margins])

    def _smallest(self, values: dict[int, float]) -> list[int]:
        ranked = sorted(values, key=lambda i: values[i])
        if len(ranked) > 1:
            self.decide(values[ranked[1]] - values[ranked[0]])
        return ranked[:1]

    def _best(self, values: dict[int, float]) -> int:
        return self._smallest({i: -x for i, x in values.items()})[0]


def decode(model: ReferenceTransformer, prompt: list[int], config, noise: Callable[[int], np.ndarray]) -> Row:
    """Runs one row to its end."""
    decoders = {
        "streaming": fallback if config.verify == "fallback" else streaming,
        "verified": verified,
        "lookup": lookup,
        "blockwise": blockwise,
        "ar": autoregressive,
    }
    row = Row(model, config, noise, prompt, list(prompt))
    decoders[config.decoder](row)
    return row


def streaming(row: Row) -> None:
    """Algorithm 1. "eager" tops the masks up to W before the forward, "paper" tops the window up to W after the commit."""
    c = row.config
    window: list[int | None] = [None] * c.window_size
    while True:
        lead = _leading_run(window)
        if c.refill == "eager":
            window = window + [None] * lead
        logits = row.forward(window)
        row.emit(window[:lead])
        if row.finish:
            return
        masks = [i for i, token in enumerate(window) if token is None]
        base = len(row.context)
        for i in row.select_by_entropy(logits, masks):
            window[i] = row.pick(logits[i], base + i)
        row.context += window[:lead]
        window = window[lead:]
        if c.refill == "paper":
            window = window + [None] * lead


def verified(row: Row) -> None:
    """Slot 0 is an emitted token that is not cached yet; the leading drafts behind it are checked by the forward that
    caches them, and only tokens of the autoregressive chain are emitted. With window_size "auto", W begins at 32, halves down
    to 4 where none of the drafts was right, and doubles up to 32 where half of it was accepted. The masks of the first window
    are fed with the prompt, so that its drafts are there before the first forward that counts.

    Where text is trusted more than the leading drafts, it takes the place of the window, and only W slots are fed; if it is
    wrong somewhere, what it took the place of comes back."""
    auto = row.config.window_size == "auto"
    W = 32 if auto else row.config.window_size
    window: list[int | None] = [row.context.pop()] + [None] * (W - 1)
    if W > 1:
        logits, base, masks = row.forward(window, in_prefill=True), len(row.context), list(range(1, W))
        for i in row.passing(logits, masks) or masks[:1]:
            window[i] = row.pick(logits[i], base + i)
    masks_failed = False
    while True:
        by_masks, lead = window + [None] * 2 * W, _leading_run(window)
        text, matched = continuation(row.prompt + row.emitted, W - 1, longest=8)
        from_text = row.config.text_drafts and matched > (lead - 1) * (0.5 if masks_failed else 2)
        if from_text:
            window = [window[0], *text]
            lead = len(window)
        fed = W if from_text else W + lead
        window = (window + [None] * fed)[:fed]
        logits = row.forward(window)
        base = len(row.context)
        chain = [row.pick(logits[0], base + 1)]
        while len(chain) < lead and window[len(chain)] == chain[-1]:
            chain.append(row.pick(logits[len(chain)], base + len(chain) + 1))
        row.emit(chain)
        if row.finish:
            return
        accepted = len(chain)
        if not from_text and lead > 1:
            masks_failed = accepted == 1
        wrong_text = from_text and accepted < lead
        behind = range(accepted + 1, accepted + W)
        after = {i: (by_masks if wrong_text else window + [None] * W)[i] for i in behind}
        masks = [i for i in behind if i < fed and window[i] is None]
        if masks and not wrong_text:
            for i in row.passing(logits, masks) or masks[:1]:
                after[i] = row.pick(logits[i], base + i)
        row.context += window[:accepted]
        window = [chain[-1], *after.values()]
        if auto and accepted >= W / 2:
            W = min(2 * W, 32)
        elif auto and accepted == 1 and lead > 1:
            W = max(W // 2, 4)


def fallback(row: Row) -> None:
    """Slot 0 is the last emitted token. The leading run is emitted unchecked; where no mask passes the rule, so is the token
    that the autoregressive model puts behind it."""
    W = row.config.window_size
    window: list[int | None] = [row.context.pop()] + [None] * (W - 1)
    while True:
        last = _leading_run(window) - 1
        window = window + [None] * last
        logits = row.forward(window)
        base = len(row.context)
        masks = [i for i, token in enumerate(window) if token is None]
        filling = row.passing(logits, masks) if masks else []
        run = window[1 : last + 1]
        if not filling:
            run.append(row.pick(logits[last], base + last + 1))
        row.emit(run)
        if row.finish:
            return
        for i in filling:
            window[i] = row.pick(logits[i], base + i)
        row.context += window[: len(run)]
        window = [([window[0], *run])[-1], *window[len(run) + 1 :]]
        window += [None] * (W - len(window))


def lookup(row: Row) -> None:
    """Drafts are what followed the longest of the last 3, 2 or 1 tokens where they came last before; checked as in `verified`."""
    history, pending = list(row.context), row.context.pop()
    window = [pending, *continuation(history, row.config.window_size - 1)[0]]
    while True:
        logits = row.forward(window)
        base = len(row.context)
        chain = [row.pick(logits[0], base + 1)]
        while len(chain) < len(window) and window[len(chain)] == chain[-1]:
            chain.append(row.pick(logits[len(chain)], base + len(chain) + 1))
        row.emit(chain)
        if row.finish:
            return
        row.context += window[: len(chain)]
        history += chain
        window = [chain[-1], *continuation(history, row.config.window_size - 1)[0]]


def continuation(history: list[int], most: int, longest: int = 3) -> tuple[list[int], int]:
    """What followed the longest match of the history's end, and how many tokens match."""
    for n in range(longest, 0, -1):
        for end in range(len(history) - 1, n - 1, -1):
            if history[end - n : end] == history[-n:]:
                text = list(history)
                while len(text) < end + most and n >= 3:  # it goes on as what it repeats
                    text.append(text[end + len(text) - len(history)])
                return text[end : end + most], n
    return [], 0


def blockwise(row: Row) -> None:
    """Blocks of J from left to right, the last one cut to what is left. The next block's first forward caches a full one."""
    c = row.config
    full: list[int] = []
    while not row.finish:
        block: list[int | None] = [None] * min(c.block_size, c.max_new_tokens - len(row.emitted))
        while None in block:
            logits = row.forward(full + block)[len(full) :]
            row.context += full
            full = []
            masks = [i for i, token in enumerate(block) if token is None]
            for i in row.select_by_confidence(logits, masks):
                block[i] = row.pick(logits[i], len(row.context) + i)
        row.emit(block)
        full = block


def autoregressive(row: Row) -> None:
    pending = row.context.pop()
    while not row.finish:
        logits = row.forward([pending])
        row.context.append(pending)
        pending = row.pick(logits[0], len(row.context))
        row.emit([pending])


def _leading_run(window: list[int | None]) -> int:
    return window.index(None) if None in window else len(window)


def _nucleus(ranked: list[int], logits: dict[int, float], top_p: float) -> list[int]:
    """The likeliest tokens whose probabilities reach `top_p`, the one that crosses it included."""
    kept, total = [], 0.0
    for i, p in zip(ranked, _softmax(np.array([logits[i] for i in ranked])), strict=True):
        kept.append(i)
        total += p
        if total >= top_p:
            break
    return kept


def _softmax(logits: np.ndarray) -> np.ndarray:
    e = np.exp(logits - np.max(logits))
    return e / e.sum()


def _entropy(logits: np.ndarray) -> float:
    p = _softmax(logits)
    return float(-sum(x * math.log(x) for x in p if x > 0))
