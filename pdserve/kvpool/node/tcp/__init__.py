"""The node's end of the TCP data path. May import `core.events`, `transports` and the node's `config`.

`page_worker` moves one connection's pages, `listener` lets data connections in, `server` joins them.
"""
