"""Stores of pages other than pool nodes (`pool.engine`): the `PageStore` contract, its kinds, their clients.

May import: client, protocol. It knows no SGLang. A kind is found by entry point; `base` is the contract.
"""
