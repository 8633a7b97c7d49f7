"""The pool client: routing of keys to nodes, connections to nodes, and batches of pages in both directions.

May import: protocol, cluster (the ring), namespaces (rights), transports, discovery. It knows a node by its
protocol only.
"""
