"""The memory of a node: arena and slot table as files in shared memory, and their kind of memory.

May import `core` and what lies below it, and nothing else of the node.
"""
