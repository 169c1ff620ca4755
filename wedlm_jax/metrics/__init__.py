"""Metrics of a run: where they are written, how fast it is, how long it still takes, and their curves."""

from wedlm_jax.metrics.progress import ProgressBar
from wedlm_jax.metrics.throughput import TIME_FIELDS, Throughput
from wedlm_jax.metrics.writers import MetricsWriter, fetch, read_metrics

__all__ = ["TIME_FIELDS", "MetricsWriter", "ProgressBar", "Throughput", "fetch", "read_metrics"]
