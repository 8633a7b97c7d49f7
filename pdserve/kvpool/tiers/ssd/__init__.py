"""The SSD tier: segment files written from start to end, their index, and the choice of what makes room.

Belongs here: all that only this tier needs. May import: pdserve.kvpool.tiers, pdserve.kvpool.protocol.
"""
