"""A scheduler process says whose pages it looks up and stores: SGLang 0.5.23 has the salt of a request, which
names the tenant, in its tree of pages, and gives it to no storage backend. kvpool/hicache/owners.py has how
it is said.

| method of SGLang | change |
|---|---|
| `UnifiedRadixCache.prefetch_from_storage`, `query_storage_hit_length` | look up the tenant's pages |
| `UnifiedRadixCache.__init__` | its `tree_core` marks what it gives to be stored |

Importing this module imports no SGLang.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from pdserve.kvpool.hicache.owners import marked
from pdserve.kvpool.namespaces.tenants import tenant_of


def lookups_marked(place: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """`place`: of `prefix_keys` among the arguments of the method that is replaced."""

    def change(look_up: Callable[..., Any]) -> Callable[..., Any]:
        def by_tenant(cache: Any, *args: Any, cache_salt: str | None = None, **more: Any) -> Any:
            given = list(args)
            given[place] = marked(given[place], tenant_of(cache_salt))
            return look_up(cache, *given, cache_salt=cache_salt, **more)

        return by_tenant

    return change


def stores_marked(init: Callable[..., None]) -> Callable[..., None]:
    """`init` makes the cache with its tree, of which SGLang has several."""

    def made(cache: Any, *args: Any, **more: Any) -> None:
        init(cache, *args, **more)
        tree = cache.tree_core
        spec_of, snapshot_of = tree.build_storage_backup_spec, tree.snapshot_buffer_backup

        def spec(node_id: Any, pass_prefix_keys: bool) -> Any:
            found = spec_of(node_id, pass_prefix_keys)
            if found is None:
                return None
            _, salt = tree.prefetch_anchor_info(node_id)
            return found._replace(prefix_keys=marked(found.prefix_keys, tenant_of(salt)))

        def snapshot(node_id: Any, pass_prefix_keys: bool) -> Any:
            found = snapshot_of(node_id, pass_prefix_keys)
            if found is None:
                return None
            keys = marked(found.prefix_keys, tenant_of(found.key.cache_salt))
            return msgspec.structs.replace(found, prefix_keys=keys)

        tree.build_storage_backup_spec, tree.snapshot_buffer_backup = spec, snapshot

    return made
