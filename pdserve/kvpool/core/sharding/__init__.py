"""What a node does about pages of other nodes: ownership, replicas that it holds, replicas that it asks for.

Pure. May import: core/store, core/events.py, core/sessions.py, cluster, protocol.
"""
