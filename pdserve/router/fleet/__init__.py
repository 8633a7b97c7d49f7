"""The workers: which there are, what they serve, whether they are well, how loaded they are.

May import: sessions, tenants, upstream, metrics, api, config. It chooses no worker; `placement` does.
"""
