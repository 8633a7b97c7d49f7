"""Figures of serving runs as tables and pictures, and the goals they are held to.

May import: `bench.serving` and `bench.plot`.
"""
