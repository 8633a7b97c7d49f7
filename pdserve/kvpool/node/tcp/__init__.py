"""The node's end of the TCP data path. May import `core.events`, `transports` and the node's `config`.

`mover` moves one connection's pages, `door` lets data connections in, `server` joins them for the node.
"""
