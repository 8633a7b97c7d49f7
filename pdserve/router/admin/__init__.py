"""The admin port: its API, its live page, and `pdserve top`.

The package may import `app` and all below it, and `kvpool.admin` for the figures of pool nodes.
"""
