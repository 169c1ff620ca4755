"""Arrays of a wrong shape or dtype are refused at the door, before they broadcast into a wrong result."""

import jax
import jax.numpy as jnp
import pytest

from tests.model.tiny import TINY, tiny_model
from wedlm_jax.diffusion.corruption import corrupt, mask_lowest
from wedlm_jax.diffusion.dual_stream import build_dual_stream, next_token_targets, visibility
from wedlm_jax.diffusion.losses import LossWeights, ar_loss_weights, wedlm_loss
from wedlm_jax.diffusion.reordering import reorder, reorder_blocks
from wedlm_jax.model.kv_cache import KVCache
from wedlm_jax.model.patterns import DualStream
from wedlm_jax.model.rope import apply_rope, rope_angles
from wedlm_jax.ops.attention import attend, merge
from wedlm_jax.ops.cross_entropy import cross_entropy


def ints(*shape):
    return jnp.zeros(shape, jnp.int32)


def flags(*shape):
    return jnp.zeros(shape, bool)


def floats(*shape):
    return jnp.zeros(shape)


def stream(tokens=(2, 8), loss_mask=(2, 8), mask_ratio=(2, 2), block_size=4):
    rest = (ints(2, 8), ints(2, 8), flags(2, 8), floats(*mask_ratio))
    return build_dual_stream(ints(*tokens), flags(*loss_mask), *rest, mask_token_id=9, block_size=block_size)


def hidden(tokens, positions):
    return tiny_model().hidden(tokens, positions=positions)


q, k, visible = floats(2, 3, 4, 6), floats(2, 5, 2, 6), flags(2, 3, 5)
WRONG = {
    "attend: values of other length": lambda: attend(q, k, k[:, :4], visible),
    "attend: heads do not divide": lambda: attend(floats(2, 3, 3, 6), k, k, visible),
    "attend: visible as numbers": lambda: attend(q, k, k, visible.astype(int)),
    "merge: lse with an axis too many": lambda: merge(q, floats(2, 3, 4, 1), q, floats(2, 3, 4, 1)),
    "cross_entropy: head of other width": lambda: cross_entropy(floats(3, 5), floats(7, 4), ints(3)),
    "cross_entropy: too few targets": lambda: cross_entropy(floats(3, 5), floats(7, 5), ints(2)),
    "cross_entropy: targets as floats": lambda: cross_entropy(floats(3, 5), floats(7, 5), floats(3)),
    "cross_entropy: too few flags": lambda: cross_entropy(floats(3, 5), floats(7, 5), ints(3), flags(2)),
    "cross_entropy: flags as numbers": lambda: cross_entropy(floats(3, 5), floats(7, 5), ints(3), ints(3)),
    "rope_angles: positions without rows": lambda: rope_angles(ints(3), 6, 1e4),
    "rope_angles: positions as floats": lambda: rope_angles(floats(1, 3), 6, 1e4),
    "apply_rope: angles of another row": lambda: apply_rope(q, floats(1, 3, 3), floats(1, 3, 3)),
    "hidden: tokens without rows": lambda: hidden(ints(3), ints(3)),
    "hidden: tokens as floats": lambda: hidden(floats(1, 3), ints(1, 3)),
    "hidden: one row of positions for two": lambda: hidden(ints(2, 3), ints(1, 3)),
    "hidden: one row of masked for two": lambda: tiny_model().hidden(
        ints(2, 3), positions=ints(2, 3), masked=flags(1, 3)
    ),
    "hidden: masked as numbers": lambda: tiny_model().hidden(ints(2, 3), positions=ints(2, 3), masked=ints(2, 3)),
    "logits: states of other width": lambda: tiny_model().logits(floats(1, 3, 5)),
    "token_losses: one row of targets for two": lambda: tiny_model().transformer.token_losses(
        floats(2, 3, 16), ints(1, 3)
    ),
    "token_losses: one row of flags for two": lambda: tiny_model().transformer.token_losses(
        floats(2, 3, 16), ints(2, 3), flags(1, 3)
    ),
    "DualStream: a row that is not doubled": lambda: DualStream(ints(2, 8), 4)(floats(2, 8, 4, 6), k, k),
    "KVCache.write: one cursor for two rows": lambda: KVCache.zeros(TINY, 2, 8).write(0, ints(1), k, k),
    "KVCache.write: other heads": lambda: KVCache.zeros(TINY, 2, 8).write(0, ints(2), q, q),
    "reorder: one row of padding for two": lambda: reorder(flags(2, 4), flags(1, 4)),
    "reorder: flags as numbers": lambda: reorder(ints(2, 4), flags(2, 4)),
    "reorder_blocks: a row of two and a half blocks": lambda: reorder_blocks(flags(2, 10), flags(2, 10), block_size=4),
    "reorder_blocks: flags as numbers": lambda: reorder_blocks(ints(2, 8), flags(2, 8), block_size=4),
    "corrupt: one row of documents for two": lambda: corrupt(None, flags(2, 8), ints(1, 8), ints(2, 8), block_size=4),
    "corrupt: positions as floats": lambda: corrupt(None, flags(2, 8), ints(2, 8), floats(2, 8), block_size=4),
    "corrupt: a row of two and a half blocks": lambda: corrupt(
        None, flags(2, 10), ints(2, 10), ints(2, 10), block_size=4
    ),
    "mask_lowest: one gamma for two blocks": lambda: mask_lowest(floats(2, 4), flags(2, 4), floats(1)),
    "mask_lowest: candidates as numbers": lambda: mask_lowest(floats(2, 4), ints(2, 4), floats(2)),
    "build_dual_stream: tokens of other length": lambda: stream(tokens=(2, 7)),
    "build_dual_stream: one row of loss_mask for two": lambda: stream(loss_mask=(1, 8)),
    "build_dual_stream: one gamma a row": lambda: stream(mask_ratio=(2, 1)),
    "build_dual_stream: a row of two and a half blocks": lambda: stream(block_size=3),
    "next_token_targets: flags as numbers": lambda: next_token_targets(ints(2, 8), ints(2, 8), ints(2, 8)),
    "next_token_targets: one row of segments for two": lambda: next_token_targets(ints(2, 8), flags(2, 8), ints(1, 8)),
    "visibility: segments without rows": lambda: visibility(ints(8), block_size=4),
    "wedlm_loss: losses of one stream": lambda: wedlm_loss(
        floats(2, 8), LossWeights(floats(2, 8), floats(2, 8)), ar_loss_weight=1.0
    ),
    "wedlm_loss: weights of another batch": lambda: wedlm_loss(
        floats(2, 8), LossWeights(floats(1, 4), floats(2, 4)), ar_loss_weight=1.0
    ),
    "ar_loss_weights: labels as numbers": lambda: ar_loss_weights(ints(2, 8)),
}


@pytest.mark.parametrize("call", WRONG)
def test_a_wrong_array_is_refused(call):
    with pytest.raises(AssertionError, match="Chex"):
        WRONG[call]()


def test_the_same_calls_with_right_arrays_run():
    def right():
        attend(q, k, k, visible)
        stream()
        hidden(ints(2, 3), ints(2, 3))
        reorder_blocks(flags(2, 8), flags(2, 8), block_size=4)
        KVCache.zeros(TINY, 2, 8).write(0, ints(2), k, k)

    jax.eval_shape(right)
