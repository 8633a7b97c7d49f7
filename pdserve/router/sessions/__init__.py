"""Sessions: where a request's session key comes from, and the table of last turns, here or in Redis.

May import: api, config.
"""
