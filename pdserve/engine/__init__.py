"""What all workers share: SGLang's arguments and start, its HTTP server with our routes, the end of a worker.

`launch` starts a worker; `sglang` is the door to SGLang; `http` surrounds an answer.
May import: kvpool.client, kvpool.hicache, discovery, settings and what lies below; no role of a worker.
"""
