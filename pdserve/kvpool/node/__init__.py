"""The pool node's process: configuration, sockets, threads, files and timers around the decisions of `core`.

May import every folder of `kvpool` but `client`, `hicache`, `admin` and `testing`. `node.py` joins the folders
below; of these, `config` and `timers` come first, `upgrade` last.
"""
