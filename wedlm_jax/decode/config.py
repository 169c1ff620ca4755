"""DecodeConfig: what a user chooses for one completion, and RowSettings: the same as traced arrays, one entry a row."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from wedlm_jax.decode.selection import RULES
from wedlm_jax.errors import UserError, shown
from wedlm_jax.model.window_table import WindowTable

Decoder = Literal["streaming", "verified", "lookup", "blockwise", "ar"]
Refill = Literal["eager", "paper"]
Verify = Literal["none", "fallback"]
FillRule = Literal["auto", "each", "sum", "run"]
Drafter = Literal["verified", "lookup"]  # the decoders whose drafts are checked against the AR chain
PAPER_THRESHOLD = 0.4  # tau in nats of the official engine
PAPER_PENALTY = 0.02  # lambda in nats a slot, of the official engine
DRAFT_THRESHOLD = 0.7  # a wrong draft costs compute alone, so verified decoding drafts more boldly
DEFAULT_WINDOW = 16
LARGEST_FLOAT = float(np.finfo(np.float32).max)  # of the traced settings
SMALLEST_FLOAT = float(np.finfo(np.float32).tiny)  # above 0; what is smaller may be taken for 0
NO_LIMIT = int(np.iinfo(np.int32).max)
MOST_STOP_IDS = 64
STOP_ID_SLOTS = 8  # stop ids are padded to a multiple of this, so that another number of them does not recompile


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """Settings of one completion. Only `decoder`, `refill`, `verify`, the size buckets, whether every step chooses its window and
    whether anything is drawn at all are compiled in; the rest is traced."""

    decoder: Decoder = "streaming"
    window_size: int | Literal["auto"] = DEFAULT_WINDOW
    """W: masks in play (streaming, verified), W - 1 drafts at most (lookup). auto: 4 to 32 by acceptance (verified), else 16."""
    entropy_threshold: float | Literal["auto"] | None = "auto"
    """tau in nats: masks below it are filled; none = one a step, inf = all, auto = 0.4 or as calibrated (verified: 0.7)."""
    distance_penalty: float | Literal["auto"] = "auto"  # lambda in nats per slot right of the leftmost mask (Eq. 11)
    fill_rule: FillRule = "auto"
    """Masks below tau: each, sum (all of them together) or run (from the left); auto: run for verified, else each."""
    text_drafts: bool = True
    """verified also drafts what followed the same tokens before, where that is likelier right; False: masks alone."""
    verify: Verify = "none"
    """fallback: streaming takes the AR token where no mask passes the rule, instead of the likeliest guess."""
    refill: Refill = "eager"  # "eager": masks are topped up before the forward (the engine); "paper": after the commit
    reorder: bool = True  # False: masks stay in their places, in standard order, and see nothing to their right
    block_size: int = 32  # J (blockwise)
    confidence_threshold: float = 0.9  # fill what is at least as probable (blockwise); 0 = one a step
    max_new_tokens: int = 256
    temperature: float = 0.0  # 0 = greedy
    top_k: int = 0  # 0 = off; filters come in the order top-k, top-p, temperature
    top_p: float = 1.0
    stop_ids: tuple[int, ...] | None = None  # None = the model's end-of-sequence ids; a tuple = exactly these
    stop: tuple[str, ...] = ()  # stop strings, dropped from the text
    mask_token_id: int | None = None  # None = the model's
    ban_mask: bool = True  # never choose the mask id, nor ids of no token, whose rows pad the vocabulary
    seed: int = 0  # of at most 63 bits; row k of a call draws from fold_in(key(seed), k)

    def __post_init__(self) -> None:
        for name, of in (("decoder", Decoder), ("refill", Refill), ("verify", Verify), ("fill_rule", FillRule)):
            choices = get_args(of)
            if getattr(self, name) not in choices:
                raise UserError(f"{name}={shown(getattr(self, name))}: choose one of {', '.join(choices)}")
        if self.verify == "fallback" and (self.decoder != "streaming" or self.refill != "eager"):
            raise UserError(
                "verify=fallback is a mode of decoder=streaming with refill=eager; choose these, or verify=none"
            )
        for name, least in (("window_size", 1), ("block_size", 1), ("max_new_tokens", 1), ("top_k", 0), ("seed", 0)):
            if name == "window_size" and self.window_size == "auto":
                continue
            value = integer(name, getattr(self, name), bits=64 if name == "seed" else 32)
            if value < least:
                raise UserError(f"{name}={value}: must be at least {least}")
            object.__setattr__(self, name, value)  # Python's own where it was NumPy's
        # `not (x >= 0)` instead of `x < 0`, so that NaN is refused too.
        for name in ("distance_penalty", "temperature"):
            if getattr(self, name) == "auto" and name == "distance_penalty":
                continue
            if not 0 <= _number(self, name) <= LARGEST_FLOAT:
                raise UserError(f"{name}={getattr(self, name)}: must be at least 0 and finite as a float of 32 bits")
        tau = self.entropy_threshold
        if tau is not None and tau != "auto" and not _number(self, "entropy_threshold") >= 0:
            raise UserError(f"entropy_threshold={tau}: must be at least 0, inf, auto, or None for one a step")
        if not 0 <= _number(self, "confidence_threshold") <= 1:
            raise UserError(f"confidence_threshold={self.confidence_threshold}: must lie in [0, 1]")
        if not SMALLEST_FLOAT <= _number(self, "top_p") <= 1:
            raise UserError(f"top_p={self.top_p}: must lie in (0, 1] as a float of 32 bits")
        if not isinstance(self.stop, (tuple, list)) or any(not isinstance(s, str) or not s for s in self.stop):
            raise UserError(f"stop={shown(self.stop)}: must be a tuple of non-empty strings")
        object.__setattr__(self, "stop", tuple(self.stop))
        if self.stop_ids is not None:
            if not isinstance(self.stop_ids, (tuple, list)):
                raise UserError(
                    f"stop_ids={shown(self.stop_ids)}: must be a tuple of token ids, or None for the model's own"
                )
            stop_ids = tuple(dict.fromkeys(integer("stop_ids", i) for i in self.stop_ids))
            if len(stop_ids) > MOST_STOP_IDS:
                raise UserError(f"stop_ids: {len(stop_ids)} of them; give at most {MOST_STOP_IDS}")
            object.__setattr__(self, "stop_ids", stop_ids)
        if self.mask_token_id is not None:
            object.__setattr__(self, "mask_token_id", integer("mask_token_id", self.mask_token_id))
        for name in ("text_drafts", "reorder", "ban_mask"):
            if not isinstance(getattr(self, name), bool):
                raise UserError(f"{name}={shown(getattr(self, name))}: must be True or False")

    def by(self, decoder: Decoder, **changes: Any) -> DecodeConfig:
        """These settings for another decoder, which has no fallback: that is streaming's alone."""
        verify = self.verify if decoder == "streaming" else "none"
        return dataclasses.replace(self, decoder=decoder, verify=verify, **changes)

    def changes(self, defaults: DecodeConfig) -> list[str]:
        """What is set otherwise than in `defaults`, each as `name=value`, for a title."""
        return [f"{name}={value}" for name, value in vars(self).items() if value != getattr(defaults, name)]

    @property
    def refill_rule(self) -> Refill:
        """`refill` of streaming; of the others, which do not read it, the default: it parts no requests and compiles nothing."""
        return self.refill if self.decoder == "streaming" else "eager"

    @property
    def uses_masks(self) -> bool:
        return self.decoder not in ("ar", "lookup")

    @property
    def holds_back(self) -> bool:
        """Whether the first decode forward feeds the last prompt token, whose row says what AR puts next: by all that read the AR
        chain."""
        return self.reads_chain or self.verify == "fallback"

    @property
    def reads_chain(self) -> bool:
        """Whether every emitted token is one of the AR chain."""
        return self.decoder in ("ar", "verified", "lookup")

    @property
    def drafter(self) -> Drafter | None:
        """Who drafts, before the first decode forward too; None where the decoder has no drafts."""
        return self.decoder if self.decoder in get_args(Drafter) else None  # type: ignore[return-value]

    @property
    def tau(self) -> float:
        """The entropy threshold as a number; -inf where one mask a step is filled."""
        if self.entropy_threshold == "auto":
            return DRAFT_THRESHOLD if self.decoder == "verified" else PAPER_THRESHOLD
        return -math.inf if self.entropy_threshold is None else self.entropy_threshold

    @property
    def penalty(self) -> float:
        """The distance penalty as a number."""
        return PAPER_PENALTY if self.distance_penalty == "auto" else self.distance_penalty

    @property
    def adapts(self) -> bool:
        """Whether every step chooses its window."""
        return self.window_size == "auto" and self.decoder == "verified"

    @property
    def window(self) -> int:
        """W as a number, where no step chooses it."""
        return DEFAULT_WINDOW if self.window_size == "auto" else self.window_size

    @property
    def sized_by(self) -> Literal["window_size", "block_size"] | None:
        """The field that says how many tokens a forward is fed; None where that is one."""
        return None if self.decoder == "ar" else "block_size" if self.decoder == "blockwise" else "window_size"

    @property
    def rule(self) -> int:
        """The number of the fill rule in `selection.RULES`."""
        rule = ("run" if self.decoder == "verified" else "each") if self.fill_rule == "auto" else self.fill_rule
        return list(RULES).index(rule)

    def program(self, window_table: WindowTable) -> tuple[object, ...]:
        """What requests must have in common to run in one compiled loop."""
        return self.decoder, self.refill_rule, self.verify, self.adapts, self.slots(window_table)

    def slots(self, window_table: WindowTable) -> int:
        """Window slots of the compiled loop: the bucket (a power of two) that these settings fall into on a model of this
        table."""
        if self.decoder == "ar":
            return 1
        if self.decoder == "blockwise":
            return 2 * _power_of_two(self.block_size)  # a finished block, to be cached, and the next one
        # More rows never get a wider window than one, which the bucket must hold.
        bucket = _power_of_two(window_table.widest(1) if self.adapts else self.window)
        alone = self.decoder == "lookup" or self.refill_rule == "paper"
        return bucket if alone else 2 * bucket

    @property
    def stop_id_slots(self) -> int:
        """Stop ids of the compiled loop, padding included."""
        return max(-(-len(self.stop_ids or ()) // STOP_ID_SLOTS), 1) * STOP_ID_SLOTS


def integer(name: str, value: object, bits: int = 32) -> int:
    """`value` as an int.

    Raises:
      UserError: it is none, or exceeds so many bits, the sign among them.
    """
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise UserError(f"{name}={shown(value)}: must be an integer")
    if not -(2 ** (bits - 1)) <= value < 2 ** (bits - 1):
        raise UserError(f"{name}={value}: must fit in {bits} bits, its sign among them")
    return int(value)


def at_least_one(name: str, value: object) -> int:
    """`value` as an int of at least 1.

    Raises:
      UserError: it is none, below 1, or exceeds 32 bits.
    """
    if (number := integer(name, value)) < 1:
        raise UserError(f"{name}={number}: must be at least 1")
    return number


def _number(config: DecodeConfig, name: str) -> float:
    value = getattr(config, name)
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise UserError(f"{name}={shown(value)}: must be a number")
    try:
        return float(value)
    except OverflowError:
        raise UserError(f"{name}: is larger than any float") from None


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowSettings:
    """The traced settings of B rows."""

    window_size: jax.Array  # int32 [B]; of "auto" the widest, see `for_rows`
    entropy_threshold: jax.Array  # float32 [B]; -inf = one a step
    distance_penalty: jax.Array  # float32 [B]
    rule: jax.Array  # int32 [B], an index into selection.RULES
    text_drafts: jax.Array  # bool [B]
    reorder: jax.Array  # bool [B]
    block_size: jax.Array  # int32 [B]
    confidence_threshold: jax.Array  # float32 [B]; inf = one a step
    max_new_tokens: jax.Array  # int32 [B]
    temperature: jax.Array  # float32 [B]
    top_k: jax.Array  # int32 [B]; 0 = off
    top_p: jax.Array  # float32 [B]
    stop_ids: jax.Array  # int32 [B, n], padded with -1
    mask_token_id: jax.Array  # int32 [B]; -1 where the model has none. Every decoder bans it
    ban_mask: jax.Array  # bool [B]
    num_tokens: jax.Array  # int32 [B]; ids from there on are no tokens
    key: jax.Array  # PRNG keys [B]
    window_table: WindowTable = dataclasses.field(metadata={"static": True})  # of the model
    adapts: bool = dataclasses.field(metadata={"static": True})  # every row's window_size is "auto"; see auto_window.py
    # Whether any row has a temperature above 0. Compiled in: of the time that XLA takes for a loop, two fifths are for draws.
    draws: bool = dataclasses.field(metadata={"static": True})

    @classmethod
    def from_configs(
        cls, configs: Sequence[DecodeConfig], rows: Sequence[int], window_table: WindowTable, num_tokens: int = NO_LIMIT
    ) -> RowSettings:
        """Stacks configs of one `program` whose `stop_ids` and `mask_token_id` are resolved.

        Args:
          rows: the row numbers that seed the noise.
          window_table: of the model: which automatic windows are worth their cost, and which widths are compiled.
          num_tokens: of the model: ids from there on are no tokens.
        """
        widest = window_table.widest(len(configs))

        def column(name: str, dtype: str) -> np.ndarray:
            return np.array([getattr(c, name) for c in configs], dtype)

        width = max(c.stop_id_slots for c in configs)
        stop_ids = [[*(c.stop_ids or ()), *[-1] * (width - len(c.stop_ids or ()))] for c in configs]
        columns = dict(
            window_size=np.array([widest if c.adapts else c.window for c in configs], "int32"),
            entropy_threshold=column("tau", "float32"),
            distance_penalty=column("penalty", "float32"),
            rule=column("rule", "int32"),
            text_drafts=column("text_drafts", "bool"),
            reorder=column("reorder", "bool"),
            block_size=column("block_size", "int32"),
            confidence_threshold=np.array([c.confidence_threshold or math.inf for c in configs], "float32"),
            max_new_tokens=column("max_new_tokens", "int32"),
            temperature=column("temperature", "float32"),
            top_k=column("top_k", "int32"),
            top_p=column("top_p", "float32"),
            stop_ids=np.array(stop_ids, "int32"),
            mask_token_id=np.array([-1 if c.mask_token_id is None else c.mask_token_id for c in configs], "int32"),
            ban_mask=column("ban_mask", "bool"),
            num_tokens=np.full(len(configs), num_tokens, "int32"),
        )
        adapts, draws = configs[0].adapts, any(c.temperature > 0 for c in configs)
        seeds = column("seed", "int64")
        halves = (seeds >> 32).astype("uint32"), seeds.astype("uint32")
        arrays, key = _on_device(columns, *halves, np.array(rows, "int32"))
        return cls(**arrays, key=key, window_table=window_table, adapts=adapts, draws=draws)

    def for_rows(self, computed: int) -> RowSettings:
        """These settings in forwards of which a device computes so many rows, not just these: automatic windows depend on it."""
        if not self.adapts:
            return self
        widest = np.full(self.window_size.shape, self.window_table.widest(computed), np.int32)
        return dataclasses.replace(self, window_size=widest)  # type: ignore[arg-type]


@jax.jit
def _on_device(
    columns: dict[str, np.ndarray], high: np.ndarray, low: np.ndarray, rows: np.ndarray
) -> tuple[dict[str, jax.Array], jax.Array]:
    """The columns, and a key of noise for each row: one program for all, since to transfer each by itself is most of what a call
    costs the host. Seeds come as their upper and lower 32 bits, since jax by itself takes no more than 32."""

    def key_of(high: np.ndarray, low: np.ndarray, row: np.ndarray) -> jax.Array:
        key = jax.random.key(low)
        return jax.random.fold_in(jnp.where(high > 0, jax.random.fold_in(key, high), key), row)

    return columns, jax.vmap(key_of)(high, low, rows)  # type: ignore[return-value]
