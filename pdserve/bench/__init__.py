"""`pdserve bench`: measurements of serving, router and pool, and the pool under faults.

Here stand the parts that several benchmarks share. May import every part of pdserve but doctor.
"""
