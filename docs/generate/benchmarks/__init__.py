"""Blocks of `docs/benchmarks` and of README.md, rendered from the raw lines in `benchmarks/results`."""
