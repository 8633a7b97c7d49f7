"""Processes of other software in a cluster: their tables, and their command lines. Pure.

Imports nothing of pdserve, as the supervisor knows none of the processes that it runs.
"""
