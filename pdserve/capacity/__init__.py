"""What a machine has and what a model takes: which GPUs and how much memory each process of a cluster gets.

`gather` and `available` read machine and files; all else is pure: facts in, a plan out.
May import: settings and what lies below.
"""
