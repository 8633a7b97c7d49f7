"""Pages that are stored in another form than in memory: compressed, encrypted, or both.

The package may import: pdserve.kvpool.tiers.base, .durable_files, pdserve.kvpool.protocol.
"""
