"""Whether a request may run now: its key, its tenant's limits, and the fair queue for its model.

May import: request, placement, fleet, tenants, metrics, api, config. `dispatch` is its equal.
"""
