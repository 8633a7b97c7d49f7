"""Pages that were deleted are in no file of any node: arenas, segments and the bucket are searched."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pdserve.errors import PoolError
from pdserve.kvpool.client.async_client import AsyncPoolClient
from pdserve.kvpool.client.client import PoolClient
from tests.support.command import pdserve_here
from tests.support.kvpool.node_processes import NodeProcess, client_of, pool_of
from tests.support.kvpool.tier_tools import KIB, contents, key
from tests.support.waiting import until

PAGE = 60 * KIB
MIB = KIB * KIB
GEOMETRY = {"kv_dtype": "bfloat16"}
ACME, OTHER = range(16), range(100, 116)


@dataclass
class Searched:
    nodes: list[NodeProcess]
    directory: Path

    def holding(self, numbers: range) -> set[str]:
        """The files that have bytes of these pages, by the names of their directories."""
        wanted = [contents(n, PAGE)[4000:4064].tobytes() for n in numbers]
        arenas = [node.arena_path for node in self.nodes]
        found = set()
        for file in [*arenas, *(one for one in self.directory.rglob("*.seg") if one.is_file())]:
            data = file.read_bytes() if file.exists() else b""
            if any(one in data for one in wanted):
                found.add("arena" if file in arenas else file.relative_to(self.directory).parts[0])
        return found

    def put(self) -> None:
        """Pages of both tenants, that are in every tier then."""
        with closing(PoolClient(client_of(self.nodes), "chat@1", GEOMETRY)) as pool:
            for tenant, numbers in (("acme", ACME), ("other", OTHER)):
                pages = [(contents(n, PAGE),) for n in numbers]
                assert all(pool.put([key(n) for n in numbers], pages, tenant))
        until(lambda: {"arena", "ssd", "bucket"} <= self.holding(OTHER), "not in all tiers")
        until(lambda: {"arena", "ssd", "bucket"} <= self.holding(ACME), "not in all tiers")

    def ask(self, question: Callable[[AsyncPoolClient], Any]) -> Any:
        async def asking() -> Any:
            with closing(AsyncPoolClient(client_of(self.nodes), "chat@1", GEOMETRY)) as pool:
                return await question(pool)

        return asyncio.run(asking())


@pytest.fixture
def searched(tmp_path: Path) -> Iterator[Searched]:
    def tiers(name: str) -> dict[str, Any]:
        bucket = {"url": f"file://{tmp_path}/bucket", "segment_bytes": "1MiB", "spool_bytes": "8MiB"}
        return {
            "tiers": [
                {
                    "kind": "ssd",
                    "path": str(tmp_path / "ssd" / name),
                    "capacity_bytes": 64 * MIB,
                    "write": "all",
                    "options": {"segment_bytes": "1MiB"},
                },
                {
                    "kind": "object",
                    "path": str(tmp_path / "spool" / name),
                    "capacity_bytes": 64 * MIB,
                    "write": "all",
                    "options": {**bucket, "flush_s": 0.1, "refresh_s": 0.3},
                },
            ]
        }

    with pool_of(2, tmp_path, {"capacity_bytes": 8 * MIB}, own_settings=tiers) as nodes:
        yield Searched(nodes, tmp_path)


def test_no_byte_of_a_deleted_tenant_is_left_anywhere(searched: Searched) -> None:
    searched.put()
    shown = json.loads(pdserve_here("pool", "tenants", searched.nodes[0].address, "--json").stdout)
    assert shown["tenants"]["acme"]["memory_bytes"] >= len(ACME) * PAGE
    done = pdserve_here("pool", "delete", searched.nodes[0].address, "--tenant", "acme", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["pages"] > 0, told["away"]) == (True, [])
    assert searched.holding(ACME) == set()
    assert searched.holding(OTHER) == {"arena", "ssd", "bucket"}
    keys = [key(n) for n in OTHER]
    assert all(searched.ask(lambda pool: pool.exists(keys, "other")))
    assert not any(searched.ask(lambda pool: pool.exists([key(n) for n in ACME], "acme")))


def test_no_byte_of_single_pages_that_were_deleted_is_left_anywhere(searched: Searched) -> None:
    searched.put()
    some, rest = ACME[:6], ACME[6:]
    told = searched.ask(lambda pool: pool.erase([key(n) for n in some], "acme"))
    [count] = told.values()
    assert isinstance(count, int), told
    assert searched.holding(some) == set()
    assert searched.holding(OTHER) == {"arena", "ssd", "bucket"}
    assert all(searched.ask(lambda pool: pool.exists([key(n) for n in rest], "acme")))


def test_clients_go_on_with_a_tenant_whose_pages_were_deleted(searched: Searched) -> None:
    keys, pages = [key(n) for n in ACME], [(contents(n, PAGE),) for n in ACME]

    async def deleted(pool: AsyncPoolClient) -> tuple[list[bool], list[bool]]:
        before = await pool.exists(keys, "acme")
        assert not [one for one in (await pool.erase_tenant("acme")).values() if isinstance(one, PoolError)]
        return before, await pool.exists(keys, "acme")

    with closing(PoolClient(client_of(searched.nodes), "chat@1", GEOMETRY)) as pool:
        assert all(pool.put(keys, pages, "acme"))
        assert searched.ask(deleted) == ([True] * len(keys), [False] * len(keys))
        assert pool.exists(keys, "acme") == [False] * len(keys)
        assert all(pool.put(keys, pages, "acme"))
        assert all(pool.exists(keys, "acme"))
        assert pool.counters.failures == 0


@pytest.mark.parametrize("whole", [pytest.param(True, id="a tenant"), pytest.param(False, id="single pages")])
def test_a_node_that_was_away_erases_what_was_deleted_meanwhile(searched: Searched, whole: bool) -> None:
    searched.put()
    away, wanted = searched.nodes[1], [key(n) for n in ACME]
    away.kill()
    told = searched.ask(lambda pool: pool.erase_tenant("acme") if whole else pool.erase(wanted, "acme"))
    assert any(isinstance(one, PoolError) and "node1" in str(one) for one in told.values()), told
    assert "arena" in searched.holding(ACME)
    away.start()
    until(lambda: not searched.holding(ACME), "it still has pages")
    keys = [key(n) for n in ACME]
    # the other node hears from the bucket, a moment later, that their objects are gone
    until(lambda: not any(searched.ask(lambda pool: pool.exists(keys, "acme"))), "they are still told")
    assert all(searched.ask(lambda pool: pool.exists([key(n) for n in OTHER], "other")))
