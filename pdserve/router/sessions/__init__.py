"""Sessions: the session key of a request, and the table of last turns, in this process or in Redis.

The package may import: api, config.
"""
