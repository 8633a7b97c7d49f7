"""Tenants: API keys, limits and use, and the cache salt that keeps tenants' caches apart.

May import: api, config. Waiting for a free slot is the subject of `admission`.
"""
