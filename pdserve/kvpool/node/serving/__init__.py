"""How a node serves its clients: listening sockets, connections, and the order of requests.

May import `core` and what lies below it, and of the node `metrics` and `timers`.
"""
