"""The roofline of a decode forward (Williams et al., 2009): the least time that this machine's own rates allow for it."""

from __future__ import annotations

import dataclasses
import statistics
import time

import jax
import jax.numpy as jnp

from wedlm_jax.errors import UserError, out_of_memory
from wedlm_jax.model.config import ModelConfig
from wedlm_jax.model.flops import non_embedding_parameters

REPEATS = 5


@dataclasses.dataclass(frozen=True)
class Rates:
    """What the device was measured to do, or several together."""

    flops: float  # a second, of plain products
    bytes: float  # a second, read

    @classmethod
    def measured(cls, dtype: str, precision: str = "default") -> Rates:
        """By a product of square matrices in this dtype, and of an array that no cache holds with a vector.

        Args:
          dtype: of the model's computation.
          precision: of its products (`ModelConfig.precision`): by "default" an accelerator multiplies float32 several times
            as fast as by "highest".

        Raises:
          UserError: there is no room for the array.
        """
        on_cpu = jax.default_backend() == "cpu"
        size, long_bytes = (1024, 2**28) if on_cpu else (8192, 2**32)
        try:
            product = _seconds(
                jax.jit(lambda x: jnp.matmul(x, x, precision=precision)), jnp.full((size, size), 1 / size, dtype)
            )
            # A product with a vector reads the array once, on all cores. Always float32: with bfloat16 a CPU takes ten times as
            # long, which says nothing of its memory.
            long = jnp.zeros((long_bytes // 4096, 1024), jnp.float32)
            reading = _seconds(jax.jit(lambda x: x @ jnp.ones((1024,), jnp.float32)), long)
        except jax.errors.JaxRuntimeError as error:
            if not out_of_memory(error):
                raise
            raise UserError(
                f"out of memory while the rates of this device are measured, which takes {long_bytes / 2**30:.1f} GiB beside the "
                "model; take a smaller one, or --dtype bfloat16"
            ) from error
        return cls(2 * size**3 / product, long_bytes / reading)

    def times(self, devices: int) -> Rates:
        """Of so many devices that share the work evenly."""
        return Rates(devices * self.flops, devices * self.bytes)


def _seconds(run: jax.stages.Wrapped, x: jax.Array) -> float:
    jax.block_until_ready(run(x))
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        jax.block_until_ready(run(x))
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def forward_bytes(config: ModelConfig, *, rows: int, context: float) -> float:
    """What a forward reads at least: every parameter of the layers and the output layer, and the cache slots in use, once."""
    cache = 2 * config.num_layers * config.num_kv_heads * config.head_dim * rows * context
    head, of_dtype = config.vocab_size * config.hidden_size, jnp.dtype(config.dtype).itemsize
    of_kernels = jnp.dtype(config.kernel_dtype or config.dtype).itemsize
    return non_embedding_parameters(config) * of_kernels + (head + cache) * of_dtype


def forward_seconds(
    config: ModelConfig, rates: Rates, *, rows: int, slots: float, read: float, context: float
) -> float:
    """The least time of one forward over the window slots of a batch: of reading, or of computing, whichever takes longer.

    Args:
      config: the model.
      rates: of the device.
      rows: B.
      slots: window slots of a row that are fed.
      read: those of them whose logits are wanted; the others leave keys and values, and in the last layer nothing else.
      context: cache slots that a row reads.
    """
    queries = config.num_heads * config.head_dim
    unread = config.hidden_size * (config.vocab_size + 2 * queries + 3 * config.intermediate_size)
    products = _parameters(config) * slots - unread * (slots - read)
    scores = 2 * queries * context * ((config.num_layers - 1) * slots + read)
    flops = 2 * rows * (products + scores)
    return max(forward_bytes(config, rows=rows, context=context) / rates.bytes, flops / rates.flops)


def _parameters(config: ModelConfig) -> int:
    return non_embedding_parameters(config) + config.vocab_size * config.hidden_size
