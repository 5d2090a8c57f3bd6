"""Measurements of this project, run from a checkout as ``python -m benchmarks.NAME``."""
