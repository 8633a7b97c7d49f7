"""A pool node within the calling process, without sockets and threads: for tests of clients and of the node.

May import `core`, `node.tiers` and `transports`. The product does not import it.
"""
