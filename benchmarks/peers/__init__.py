"""Other programs that store or move bytes, measured beside the pool in the same run.

May import: the top modules of bench, and the pool's page buffers.
"""
