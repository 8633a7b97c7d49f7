"""Several hosts on one machine, and a cluster over them under faults of networks and hosts: `pdserve bench
hosts`. Hosts are namespaces of Linux; routers, pool nodes, the supervisor and its `--on ssh` are the real
ones. Workers are scripted: they compute nothing, and have real pages in the real pool.
"""
