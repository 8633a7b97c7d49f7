"""Honest clients of pool nodes and of a router, beside many hostile connections.

`attacks.py` says who attacks which port and how, `attacker.py` is the process that does it, `honest.py` are
the clients that are measured, `parts.py` is what is attacked, and `run.py` measures.
"""
