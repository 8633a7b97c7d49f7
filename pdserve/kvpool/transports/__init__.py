"""Connections to a node, from a client or another node: control sessions, their runners, and data paths.

May import: protocol. Nothing here decides which node to ask, or whether to ask again.
"""
