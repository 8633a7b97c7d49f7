"""The node's decisions about tiers: pages written to tiers, pages loaded from them, what each tier has.

Belongs here: pure decisions, no thread and no file. May import: the rest of pdserve.kvpool.core but `state`,
pdserve.kvpool.protocol, and the records of pdserve.kvpool.tiers.
"""
