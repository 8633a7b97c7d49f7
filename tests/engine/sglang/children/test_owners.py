"""The tenant's mark on its way from SGLang's tree of pages to the storage backend."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
import pytest

from pdserve.engine.sglang.children.scheduler import lookups_marked, stores_marked
from pdserve.kvpool.hicache.owners import marked, tenant_of_call


class Spec(NamedTuple):
    prefix_keys: list[str] | None


class Snapshot(msgspec.Struct, frozen=True):
    key: Any
    prefix_keys: list[str] | None


class Tree:
    """Nodes are salts."""

    def build_storage_backup_spec(self, node: Any, pass_prefix_keys: bool) -> Spec | None:
        return None if node == "gone" else Spec(["aa"] if pass_prefix_keys else None)

    def snapshot_buffer_backup(self, node: Any, pass_prefix_keys: bool) -> Snapshot | None:
        found = Spec(["aa"] if pass_prefix_keys else None)
        return None if node == "gone" else Snapshot(SimpleNamespace(cache_salt=node), found.prefix_keys)

    def prefetch_anchor_info(self, node: Any) -> tuple[None, Any]:
        return None, node


def call(prefix_keys: list[str] | None) -> Any:
    return SimpleNamespace(prefix_keys=prefix_keys)


@pytest.mark.parametrize("given", [None, [], ["aa", "bb"]])
def test_the_mark_survives_what_sglang_does_with_hashes_of_earlier_pages(given: list[str] | None) -> None:
    keys = marked(given, "acme")
    assert keys is not None
    for _ in range(2):  # it copies them, and appends to them
        keys = [*list(keys).copy(), "cc"]
        assert tenant_of_call(call(keys)) == "acme"
    assert marked(given, "") == given


@pytest.mark.parametrize("keys", [None, [], ["aa"], ["pdserve-tenant:"], ["pdserve-tenant:a b"]])
def test_without_a_mark_pages_are_nobodys(keys: list[str] | None) -> None:
    assert tenant_of_call(call(keys)) == tenant_of_call(None) == ""


@pytest.mark.parametrize("passed", [True, False])
@pytest.mark.parametrize(("salt", "tenant"), [("tenant/acme/own", "acme"), ("shared/x", ""), (None, "")])
def test_what_the_tree_gives_to_be_stored_says_whose_it_is(
    salt: str | None, tenant: str, passed: bool
) -> None:
    cache = SimpleNamespace()
    stores_marked(lambda made, tree: setattr(made, "tree_core", tree))(cache, Tree())
    for make in (cache.tree_core.build_storage_backup_spec, cache.tree_core.snapshot_buffer_backup):
        found = make(salt, passed).prefix_keys
        assert tenant_of_call(call(found)) == tenant
        assert (found or [])[bool(tenant) :] == (["aa"] if passed else [])
        assert make("gone", passed) is None


def test_a_lookup_says_whose_pages_it_is_for() -> None:
    def look_up(cache: Any, node: int, keys: list[str] | None, cache_salt: str | None, more: int) -> Any:
        return tenant_of_call(call(keys)), cache_salt, more

    by_tenant = lookups_marked(1)(look_up)
    assert by_tenant(None, 1, None, cache_salt="tenant/acme", more=2) == ("acme", "tenant/acme", 2)
    assert by_tenant(None, 1, ["aa"], cache_salt=None, more=2) == ("", None, 2)
