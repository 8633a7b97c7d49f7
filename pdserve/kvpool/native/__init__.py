"""Copies of page bytes between a mapped arena and a process's memory, hashed on the way: one call a batch.

`copier.c` is built where a compiler is, when pdserve is installed. Elsewhere `plain.py` does the same with
NumPy, slower, and beside a busy interpreter much slower. `copying.py` takes the one that is there. May import
the protocol.
"""
