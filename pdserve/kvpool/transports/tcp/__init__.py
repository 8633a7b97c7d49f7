"""The TCP data path: what both ends share (`stream`), and the client's end.

May import: the rest of `transports`.
"""
