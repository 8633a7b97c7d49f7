"""The SSD tier: append-only segment files, their index, and compaction.

The package may import: pdserve.kvpool.tiers, pdserve.kvpool.protocol.
"""
