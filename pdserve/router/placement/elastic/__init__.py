"""Which elastic worker has which duty, how many workers the load needs, and what a request may expect.

Pure: no input or output, no clock. May import `placement.cost`, `placement.prefix_index`, and what
`placement` may.
"""
