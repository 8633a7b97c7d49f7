"""One request: its state, the way back to its client, what its answer says of time, tokens and caches.

May import: placement, fleet, server, tenants, metrics, api, config.
"""
