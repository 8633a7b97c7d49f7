"""Load on a server of OpenAI's API: what is sent when, and what came back.

May import: nothing else of `bench.serving`.
"""
