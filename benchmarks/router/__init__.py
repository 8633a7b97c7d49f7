"""What a router costs: mock workers, a load of many connections, and routers beside each other.

May import: the top modules of bench.
"""
