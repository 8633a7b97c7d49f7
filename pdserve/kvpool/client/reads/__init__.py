"""Where a read finds pages beside their owner: at replicas of hot pages, at other clients of the host.

May import what the client may.
"""
