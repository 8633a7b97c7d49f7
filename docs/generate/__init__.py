"""Writes the generated parts of the documents; `launch/docs.sh --write` runs it.

`product.py` alone imports pdserve. `reference/` writes whole pages; `benchmarks/` writes the blocks between
markers from the raw lines in `benchmarks/results`, so that nobody types a figure.
"""
