"""Storage of pages outside memory: the `Tier` contract, the kinds of tiers, and their registry.

The package knows files and devices, but no node. It may import: pdserve.kvpool.protocol, pdserve.sizes.
"""
