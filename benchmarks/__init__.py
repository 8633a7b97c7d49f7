"""Measurements of serving, router and pool, and the pool under faults.

The modules at the top are shared by several benchmarks. Every part of pdserve but doctor may be imported.
"""
