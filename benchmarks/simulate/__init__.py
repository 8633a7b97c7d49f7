"""`pdserve plan`: how many workers and how much pool a load needs, by a simulation of the router's own
decisions.

`simulate` is pure: the same requests, sizes, rates and seed give the same outcome. May import bench (traces,
tables, dice), router, settings and what lies below; no SGLang.
"""
