"""The pool node's process: configuration, sockets, threads, files and timers around the decisions of `core`.

May import every folder of `kvpool` but `client`, `hicache` and `admin`. `node.py` joins the
folders below: `config`, `memory`, `metrics` and `timers` come first, `upgrade` last.
"""
