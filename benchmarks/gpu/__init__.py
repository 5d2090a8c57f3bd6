"""One session on one GPU, in few minutes: see ``python -m benchmarks.gpu --help``."""
