"""Steady load on a pool for as long as wanted, and what grows under it (R16).

May import: the top modules of bench, and the pages of `bench.chaos`.
"""
