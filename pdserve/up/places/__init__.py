"""Where the processes of a cluster run: on this host, or where another engine puts them. One module for each
place, found by entry point; `base` is their contract.

May import: the plan and the console of `up`, and nothing of its supervisor.
"""
