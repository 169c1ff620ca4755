"""The one place that holds the version; the build reads it from here as text."""

__version__ = "0.1.0"
