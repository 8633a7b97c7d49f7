"""What numbers of workers make of a load, by a simulation of the router's own decisions: `python -m
benchmarks.simulate`. The same requests, sizes, rates and seed give the same outcome.
"""
