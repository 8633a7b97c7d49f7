"""Benchmarks that tell the truth."""
