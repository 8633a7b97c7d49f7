"""Writes the generated parts of the documents; `launch/docs.sh --write` runs it.

`product.py` alone imports pdserve. `reference/` writes whole pages, and blocks between markers.
"""
