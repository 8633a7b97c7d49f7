"""The object store tier: segments of the SSD tier's format as objects of a bucket that all nodes share.

The package may import: pdserve.kvpool.tiers, pdserve.kvpool.protocol.
"""
