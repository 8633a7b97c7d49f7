"""The fleet: the table of workers with their models, health and load. `placement` chooses a worker.

The package may import: sessions, tenants, upstream, metrics, api, config.
"""
