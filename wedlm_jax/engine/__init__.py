"""Batches as a service: requests come at any time, rows are handed from one to the next, cached prefixes are used again."""

from wedlm_jax.engine.engine import Engine, QueueFull
from wedlm_jax.engine.in_order import in_order
from wedlm_jax.engine.ticket import Ticket

__all__ = ["Engine", "QueueFull", "Ticket", "in_order"]
