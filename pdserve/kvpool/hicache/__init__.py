"""SGLang's HiCache storage backend on the pool: the only package of the pool that imports SGLang.

May import: client, protocol. SGLang's configuration names this package, so it exports the backend's class.
"""

from pdserve.kvpool.hicache.backend import PdserveHiCache

__all__ = ["PdserveHiCache"]
