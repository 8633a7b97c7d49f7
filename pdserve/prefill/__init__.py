"""The prefill worker: computes a prompt's pages and answers once they are committed in the pool.

May import: engine, kvpool.client, and what lies below.
"""
