"""What grows with the number of pool nodes and workers, past the machines that there are: sizes of real
messages, times of real code, and rates that follow from the configuration's intervals.

May import: cluster, protocol and discovery of the pool, placement and fleet of the router.
"""
