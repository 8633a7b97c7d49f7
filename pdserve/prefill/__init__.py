"""Prefill worker: computes a prompt's pages and answers once they are committed in the pool."""
