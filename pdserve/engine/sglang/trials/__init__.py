"""SGLang's own parts tried without a server, for the check of a machine with a GPU.

May import: what `engine.sglang` may.
"""
