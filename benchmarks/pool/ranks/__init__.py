"""Ranks of a worker that move pages at the same time: the benchmark, and the process that each rank is.

May import: the pool, and the other modules of bench.
"""
