"""The admin port: its API, and its live page.

The package may import `app` and all below it.
"""
