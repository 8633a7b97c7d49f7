"""The pool client: which node has a page, connections to it, and batches of pages in both directions.

May import: protocol, cluster (the ring), namespaces (rights), transports, discovery. It knows a node by its
protocol only.
"""
