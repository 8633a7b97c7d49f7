"""The one door to SGLang: with `kvpool.hicache` the only place that imports it or uses its private names.

The names of SGLang that are used are a table of the tests (`tests/engine/sglang/symbols.txt`).
May import: the rest of `engine` but `worker` and `launch`, kvpool.client, kvpool.hicache.
"""
