"""Benchmarks of the pool: speed, tiers, index, policies, neighbours, restarts.

May import: the pool, and of bench the top modules and `peers`.
"""
