"""How a node talks to the other nodes of its pool: gossip, moving pages after a change of the ring, replicas.

May import `cluster`, `core`, `transports`, and of the node `config`, `serving` and `timers`.
"""
