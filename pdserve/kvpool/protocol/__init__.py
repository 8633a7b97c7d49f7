"""What a client and a node must agree on: messages, frames, addresses, the slot table, the bytes of a page.

Pure. May import: nothing of the pool.
"""
