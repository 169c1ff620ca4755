"""The attention primitive: a group of queries over its own short block and over a clean prefix, merged by log-sum-exp.

Training's prediction stream attends to its block and to the memory stream before it; decoding attends to a window and to a
cache. `attend` takes any mask and holds all scores, `attend_ranges` a key range for every query and visits what it must; both
are XLA alone. `attend_cache` takes the used part of a cache, by XLA or by a kernel (`split_gpu`, `window_tpu`). `splash` is a
whole causal or two-stream row in one TPU kernel, `flash_gpu` key ranges by GPU kernels. `choose` says which is used; "auto" has
every kernel but jax's own splash tried (`trial`) on the device first. Knows nothing of WeDLM.
"""

from wedlm_jax.ops.attention.blocks import DENSE_BLOCK, OwnBlocks
from wedlm_jax.ops.attention.cache import FEW_QUERIES, attend_cache, held_head_dim
from wedlm_jax.ops.attention.choice import Implementation, asked_when_loaded, choose, target_platform
from wedlm_jax.ops.attention.dense import attend, merge
from wedlm_jax.ops.attention.ranges import RESIDUALS, attend_ranges
from wedlm_jax.ops.attention.window_tpu import widen_heads

__all__ = [
    "DENSE_BLOCK",
    "FEW_QUERIES",
    "RESIDUALS",
    "Implementation",
    "OwnBlocks",
    "asked_when_loaded",
    "attend",
    "attend_cache",
    "attend_ranges",
    "choose",
    "held_head_dim",
    "merge",
    "target_platform",
    "widen_heads",
]
