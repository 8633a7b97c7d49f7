"""Tenants: API keys, limits and use, and the cache salt that separates tenants' caches.

The package may import: api, config. The queue of waiting requests is in `admission`.
"""
