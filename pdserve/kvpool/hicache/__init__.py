"""SGLang's HiCache storage backend on the pool: the only package of the pool that imports SGLang.

May import: client, protocol. SGLang's configuration names `backend`, which only SGLang imports: it brings
prometheus_client, which must not be there before SGLang has set up its multi-process mode.
"""
