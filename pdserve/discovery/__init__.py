"""Finding members of a cluster, for the pool, the router and the workers: in etcd, or as pods of Kubernetes.

May import: errors, and nothing of the parts that use it.
"""
