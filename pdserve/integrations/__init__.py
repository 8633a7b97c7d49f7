"""Other people's software on pdserve's pool, each in a folder of its own: it runs in their process.

May import: the pool's client, and what that imports. Nothing of pdserve imports these folders.
"""
