"""The threads and queues of a running node's tiers. They take actions of NodeState and return events.

The package may import: pdserve.kvpool.core, .tiers, .namespaces, and .node.config.
"""
