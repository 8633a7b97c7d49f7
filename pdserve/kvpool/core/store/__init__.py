"""The pages in memory: states of slots, index, order of eviction, room, what a restart finds.

Pure. May import: core/events.py, policies, protocol, and what is said of keys in `pdserve.pages`.
"""
