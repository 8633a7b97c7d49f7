"""Servers of OpenAI's API under load: what is started, what is sent, and what came of it.

May import: the top modules of bench, its peers, `up` to start clusters, and the names that router and worker
give their parts.
"""
