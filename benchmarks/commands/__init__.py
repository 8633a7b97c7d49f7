"""The commands of `python -m benchmarks`: options, what they print, and which benchmark they run.

A command imports its benchmark when it runs, so that `--help` needs none of them.
"""
