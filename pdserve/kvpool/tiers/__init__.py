"""Storage for pages beside memory: the `Tier` contract, the kinds of tiers, and how they are found.

Belongs here: what knows files and devices, and no node. May import: pdserve.kvpool.protocol, pdserve.sizes.
"""
