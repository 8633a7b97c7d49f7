"""Finding members of a cluster, for the pool, the router and the workers: in etcd, as pods of Kubernetes, or
on the same host.

May import: errors, and nothing of the parts that use it.
"""
