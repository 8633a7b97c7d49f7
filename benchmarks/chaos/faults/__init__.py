"""Faults of a chaos run, carried out on real nodes.

May import: the chaos run's field, plan, pages and records; not its judge.
"""
