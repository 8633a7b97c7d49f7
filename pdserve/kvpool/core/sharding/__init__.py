"""Decisions about pages of other nodes: ownership, replicas held here, replicas requested elsewhere.

Pure. May import: core/store, core/events.py, core/sessions.py, cluster, protocol.
"""
