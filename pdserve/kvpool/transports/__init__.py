"""How a client, or another node, reaches a node: the control session and its runners, and the data paths.

May import: protocol. Nothing here decides which node to ask, or whether to ask again.
"""
