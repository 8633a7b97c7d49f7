"""The node's decisions about tiers: stores to tiers, loads from them, and an index of each tier. Pure.

The package has no thread and no file. It may import: the rest of pdserve.kvpool.core except `state`,
pdserve.kvpool.protocol, and the records of pdserve.kvpool.tiers.
"""
