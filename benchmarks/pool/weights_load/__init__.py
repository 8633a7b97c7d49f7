"""How fast a model's weights are there: from a disk, by SGLang's own loaders, and from the pool.

May import: what other benchmarks may, and of engine the trials of SGLang's loaders.
"""
