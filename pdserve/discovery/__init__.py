"""Finding members of a cluster, for the pool, the router and the workers: by DNS, in etcd, or on the same
host.

May import: errors, and nothing of the parts that use it.
"""
