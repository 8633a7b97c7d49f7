"""The decisions of one node: events in, actions out, time an argument (state.py).

Pure. May import: cluster, namespaces, policies, protocol, and the records of tiers/base.py.
"""
