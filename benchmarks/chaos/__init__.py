"""A pool under faults: nodes, clients and faults in time, and a judge of what the clients saw.

A plan of faults is a function of its seed, and so are the requests of the clients; their interleaving is not.
May import: the pool, and the top modules of bench.
"""
