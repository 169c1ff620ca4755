"""The window forward, the same for every decoder: reorder, feed behind the cache, read what is asked for in logical order."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from wedlm_jax.decode.config import RowSettings
from wedlm_jax.decode.sampling import in_pieces, sample
from wedlm_jax.decode.state import DecodeState, StepRecord
from wedlm_jax.diffusion.reordering import reorder
from wedlm_jax.model.kv_cache import Cache
from wedlm_jax.model.patterns import CachedWindow, of_read
from wedlm_jax.model.transformer import Transformer
from wedlm_jax.model.window_table import WindowTable
from wedlm_jax.ops.categorical import log_prob

SMALLEST_WIDTH = 8  # a forward over fewer slots costs about the same, so nothing is compiled for them
ROUNDING = 0.1  # by which a forward over a width that is rounded up may cost more

Score = Callable[[jax.Array], jax.Array]  # logits [..., V] -> [...]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Reading:
    """What a forward says at the slots that are read, [B, C] by logical slot; elsewhere 0."""

    tokens: jax.Array  # int32: drawn. A filled row predicts the token after it, a mask row the token of its own place
    log_probs: jax.Array  # float32: of that token in nats, by the model's own logits (no filter, temperature 1)
    scores: jax.Array  # float32: the decoder's score

    @classmethod
    def zeros(cls, rows: int, slots: int) -> Reading:
        shape = (rows, slots)
        return cls(jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32), jnp.zeros(shape, jnp.float32))


def feeding_widths(slots: int, rows: int, table: WindowTable, least: int) -> tuple[int, ...]:
    """Widths to compile for a decoder that mostly feeds `least` of its C slots or more; the last one is C.

    They lie so close that rounding up what is fed costs no more than ROUNDING, but no closer than C / 8. Where slots cost next
    to nothing that is C alone.

    Args:
      slots: C.
      rows: B, which all feed as many.
      table: of the model: what a forward over more slots costs.
    """
    least = max(least, SMALLEST_WIDTH)
    cost = [table.cost(rows * width) for width in range(slots + 1)]
    widths = [slots]
    while widths[0] > least and cost[widths[0]] > (1 + ROUNDING) * cost[least]:
        # The next one down is the widest that this one would serve too dearly.
        too_dear = max(n for n in range(least, widths[0]) if cost[widths[0]] > (1 + ROUNDING) * cost[n])
        widths.insert(0, max(min(too_dear, widths[0] - slots // 8), least))
    return tuple(widths)


def window_forward(
    transformer: Transformer,
    state: DecodeState,
    settings: RowSettings,
    fed: jax.Array,
    read: jax.Array,
    *,
    widths: Sequence[int],
    most_read: int,
    score: Score | None = None,
    feeds_masks: bool = True,
) -> tuple[DecodeState, Reading]:
    """Runs the first `fed` [B] slots of every window: filled ones in physical order first, then the masks (Eq. 5, 6, 7).

    Filled slots are written to the very cache slots that they will own if they are committed; masks land behind them and
    are overwritten by the next step. A finished row's window is run and ignored.

    Where `settings.reorder` is False every slot is fed in its place (standard order). A mask then sees only what lies to its
    left, and a filled slot behind a mask is computed from that mask, so it may not be kept. What decoders commit is the
    leading filled run, which has no mask before it: its keys and values are final in either order, and so is the AR chain.

    Args:
      fed: int32 [B], at most C.
      read: bool [B, C], the slots whose logits are wanted, all of them fed.
      widths: ascending, the last one C. The forward runs over the least of them that holds what every running row feeds; all
        are compiled, and one is chosen on the device.
      most_read: an upper bound of the slots that any row reads: only so many rows see the output layer.
      score: entropy or confidence from logits; None: 0 everywhere.
      feeds_masks: False where every slot that is fed is filled, so that no adapter of mask rows has a part in it.

    Returns:
      the state with the new cache and counters, and the reading.
    """
    B, C = state.window.shape
    order = reorder(~state.filled & settings.reorder[:, None], state.slots >= fed[:, None])
    tokens = jnp.where(state.filled, state.window, jnp.maximum(settings.mask_token_id, 0)[:, None])
    tokens = jnp.take_along_axis(tokens, order, axis=1)
    masked = jnp.take_along_axis(~state.filled, order, axis=1) if feeds_masks else None

    def forward(
        width: int,
        tokens: jax.Array,
        order: jax.Array,
        length: jax.Array,
        idle: jax.Array,
        masked: jax.Array | None,
        cache: Cache,
        reading: Reading,
    ) -> tuple[Cache, Reading]:
        slots, pattern = order[:, :width], CachedWindow(length, idle=idle)
        if most_read < width:
            first = jnp.argsort(~jnp.take_along_axis(read, slots, axis=1), axis=1, stable=True)[:, :most_read]
            pattern = dataclasses.replace(pattern, read=first)
        hidden, cache = transformer.hidden(
            tokens[:, :width],
            positions=length[:, None] + slots,
            pattern=pattern,
            masked=None if masked is None else masked[:, :width],
            cache=cache,
        )
        slots = of_read(pattern, slots)
        logits = transformer.logits(hidden)
        # What fills up a row that reads less points past the end, where a dropped write goes.
        place = jnp.where(jnp.take_along_axis(read, slots, axis=1), slots, C)
        rows = jnp.arange(B)[:, None]
        new = read_slots(logits, slots, state, settings, score)
        return cache, jax.tree.map(lambda x, new: x.at[rows, place].set(new, mode="drop"), reading, new)

    widest = jnp.max(jnp.where(state.running, fed, 0))
    branches = [functools.partial(forward, width) for width in widths]
    chosen = sum((widest > width).astype(jnp.int32) for width in widths[:-1])
    inputs = tokens, order, state.length, ~state.running, masked
    cache, reading = _switch_in_place(chosen, branches, inputs, (state.cache, Reading.zeros(B, C)))
    state = dataclasses.replace(
        state,
        cache=cache,
        forwards=state.forwards + state.running,
        processed=state.processed + jnp.where(state.running, fed, 0),
    )
    return state, reading


def recorded(
    before: DecodeState,
    settings: RowSettings,
    fed: jax.Array,
    reading: Reading,
    filling: jax.Array,
    emitted: jax.Array,
) -> StepRecord:
    """What a step did, from the state that it was given."""
    return StepRecord(
        base=before.length,
        window=before.window,
        filled=before.filled,
        fed=fed,
        reordered=settings.reorder,
        score=reading.scores,
        filling=filling,
        tokens=reading.tokens,
        emitted=emitted,
        running=before.running,
    )


def _switch_in_place(
    chosen: jax.Array | int,
    branches: Sequence[Callable[..., tuple[Cache, Reading]]],
    inputs: tuple[jax.Array | None, ...],
    carry: tuple[Cache, Reading],
) -> tuple[Cache, Reading]:
    """The chosen one of `branches`, called with inputs and carry, as loops of one trip or none: XLA updates the carry of a loop
    in place, but copies the whole cache into and out of a conditional (`lax.switch`) that writes it."""
    if len(branches) == 1:
        return branches[0](*inputs, *carry)
    for number, branch in enumerate(branches):

        def only_trip(trip: jax.Array, carry: tuple, branch: Callable = branch) -> tuple[Cache, Reading]:
            # Tied to the trip: what follows from the inputs alone XLA would compute before the loop, whatever is chosen.
            of_trip, _ = jax.lax.optimization_barrier((inputs, trip))
            return branch(*of_trip, *carry)

        carry = jax.lax.fori_loop(0, jnp.where(chosen == number, 1, 0), only_trip, carry)
    return carry


def read_slots(
    logits: jax.Array, slots: jax.Array, state: DecodeState, settings: RowSettings, score: Score | None
) -> Reading:
    """What logits float32 [B, R, V] of these slots [B, R] say: `Reading` with R in the place of C.

    Row by row where that is done `in_pieces`: of all rows at once two arrays as large as the logits are held beside them.
    """

    def read(logits: jax.Array, positions: jax.Array, settings: RowSettings) -> Reading:
        tokens = sample(logits, positions, settings)
        log_probs = log_prob(logits, tokens)
        return Reading(tokens, log_probs, jnp.zeros_like(log_probs) if score is None else score(logits))

    def read_row(row: tuple[jax.Array, jax.Array, RowSettings]) -> Reading:
        return jax.tree.map(lambda x: x[0], read(*jax.tree.map(lambda x: x[None], row)))

    filled = jnp.take_along_axis(state.filled, slots, axis=1)
    given = logits, state.length[:, None] + slots + filled, settings
    return jax.lax.map(read_row, given) if min(slots.shape) > 1 and in_pieces(logits) else read(*given)
