"""HTTP/1.1 connections to workers: requests, a keep-alive pool for each worker, and incremental responses.

The package knows a worker only as a `Peer`. It may import `config`, `deadlines` and `metrics`.
"""
