"""The commands of `pdserve pool`: one module each, `cli.py` collects them.

May import: protocol, namespaces, transports, and `node/cli.py` for `pdserve pool serve`.
"""
