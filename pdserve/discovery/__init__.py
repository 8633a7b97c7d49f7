"""Finding members of a cluster through etcd, for the pool, the router and the workers.

May import: errors, and nothing of the parts that use it.
"""
