"""Benchmarks of the pool: speed, tiers, index, policies, neighbours, restarts.

May import: kvpool, and of bench only its top modules and `peers`.
"""
