"""The admin port: API, live page, and `pdserve top`.

May import `app` and what stands below it, and the pool's `kvpool.admin` for figures of its nodes.
"""
