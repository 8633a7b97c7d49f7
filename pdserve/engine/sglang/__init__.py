"""The one door to SGLang: with `kvpool.hicache` the only place that imports it or uses its private names.

Each module declares the places it leans on in `PLACES`; `selfcheck` gathers and tries them at every start.
May import: the rest of `engine` but `worker` and `launch`, kvpool.client, kvpool.hicache.
"""
