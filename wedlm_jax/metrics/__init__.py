"""Metrics of a run: where they are written, how fast it is, how long it still takes, and their curves."""
