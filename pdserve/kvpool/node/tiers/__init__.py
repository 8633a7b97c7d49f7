"""The tiers of a running node: opened, given threads, and stopped. Actions of NodeState in, events out.

Belongs here: threads and queues around a `Tier`. May import: pdserve.kvpool.core, .tiers, .namespaces, and
.node.config.
"""
