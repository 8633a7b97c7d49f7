"""The router's counters, their names, and their text form. Pure.

Imports nothing of the router.
"""
