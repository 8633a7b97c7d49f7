"""Connections to workers: requests over HTTP/1.1, a keep-alive pool for each, responses as they arrive.

Knows a worker as a `Peer` only. May import `config`, `deadlines` and `metrics`.
"""
