"""Load and mock worker in C, built where a compiler is. They cost less than the routers that they measure.

May import: the top modules of bench.
"""
