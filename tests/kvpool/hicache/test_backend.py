"""SGLang's storage backend: host pages to pool pages and back, and that nothing ever raises."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheFile,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)

from pdserve.errors import PoolUnavailable, StartupError
from pdserve.kvpool.client.client import PoolClient
from pdserve.kvpool.hicache import backend as hicache_backend
from pdserve.kvpool.hicache import page_access
from pdserve.pages import KvGeometry
from pdserve.security.tokens import reveal
from tests.support.kvpool.faulty import Pool, keys
from tests.support.kvpool.host_pool import HOST_PAGES, PAGE_TOKENS, HostPool, indices


def geometry(**changed: str) -> KvGeometry:
    fields = {"model": "m", "dtype": "bfloat16", "kv_dtype": "bfloat16", "page_size": str(PAGE_TOKENS)}
    return KvGeometry(**{**fields, "layout": "page_first", "tp_size": "1", "pp_size": "1", **changed})


def storage_config(pool: Pool, declared: KvGeometry, **changed: Any) -> Any:
    settings = {
        "pool": msgspec.to_builtins(pool.config(), enc_hook=reveal),
        "namespace": "ns",
        "geometry": declared.as_dict(),
    }
    fields: dict[str, Any] = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1}
    fields |= {"attn_cp_rank": 0, "attn_cp_size": 1, "is_mla_model": False, "enable_storage_metrics": False}
    fields |= {"is_page_first_layout": True, "model_name": "m", "extra_config": {"pdserve": settings}}
    return hicache_backend.HiCacheStorageConfig(**{**fields, **changed})


MLA = {"is_mla_model": True, "tp_size": 2}
SWA = {"parts": "swa:2"}
"""A part for layers that have a window of two pages."""


class Backends(Pool):
    """Also makes workers' backends, and closes them at its end."""

    def __init__(self) -> None:
        super().__init__()
        self._made: list[Any] = []

    def backend(
        self,
        host: HostPool,
        declared: Mapping[str, str] = MappingProxyType({}),
        parts: Mapping[str, HostPool] = MappingProxyType({}),
        **config: Any,
    ) -> Any:
        """`declared`: what its pages are said to be beside the layout of its host pages."""
        made = self.unattached({"layout": host.layout, **declared}, **config)
        attach(made, host, **parts)
        return made

    def unattached(self, declared: Mapping[str, str], **config: Any) -> Any:
        self._made.append(
            hicache_backend.PdserveHiCache(storage_config(self, geometry(**declared), **config), {})
        )
        return self._made[-1]

    def __exit__(self, *error: object) -> None:
        for made in self._made:
            made.close()
        super().__exit__(*error)


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[Backends]:
    with Backends() as pool:
        client = functools.partial(PoolClient, connector=pool.connector)
        monkeypatch.setattr(page_access, "PoolClient", client)
        yield pool


def attach(made: Any, host: HostPool, **parts: HostPool) -> None:
    """As SGLang's `HybridCacheController.attach_storage_backend`. `parts`: host pools beside KV's."""
    made.register_mem_pool_host(host)
    for name, pool in {"kv": host, **parts}.items():
        made.register_mem_host_pool_v2(pool, PoolName(name))
    made.on_host_pools_registered()


def test_host_memory_that_stages_pages_must_have_room_for_a_request(pool: Backends) -> None:
    host = HostPool("page_first")
    host.device_capacity_tokens = 10 * host.size

    def start(longest_tokens: int) -> None:
        config = storage_config(pool, geometry())
        config.extra_config["pdserve"]["longest_tokens"] = longest_tokens
        made = hicache_backend.PdserveHiCache(config, {})
        attach(made, host)
        made.close()

    start(host.size)
    start(0)  # it keeps pages too: SGLang makes room by dropping some
    with pytest.raises(StartupError, match=rf"room for {host.size:,} tokens .* may have {host.size + 1:,}"):
        start(host.size + 1)
    host.device_capacity_tokens = host.size  # no request is longer than what the device holds
    start(host.size + 1)


def names(count: int) -> list[str]:
    return [key.hex() for key in keys(count)]


@pytest.mark.parametrize("layout", ["page_first", "layer_first"])
def test_pages_come_back_into_other_host_pages(pool: Backends, layout: str) -> None:
    writer, reader = HostPool(layout), HostPool(layout)
    sources, targets = list(range(20)), list(range(99, 79, -1))
    writer.fill(sources, seed=1)
    one, two = pool.backend(writer), pool.backend(reader)
    assert one.batch_set_v1(names(20), indices(sources)) == [True] * 20
    assert two.batch_exists(names(30)) == 20
    assert two.batch_get_v1(names(20), indices(targets)) == [True] * 20
    for source, target in zip(sources, targets, strict=True):
        pairs = zip(writer.segments(source), reader.segments(target), strict=True)
        assert all(np.array_equal(a, b) for a, b in pairs)
    untouched = set(range(HOST_PAGES)) - set(targets)
    assert not any(segment.any() for page in untouched for segment in reader.segments(page))


def test_one_rank_and_two_ranks_read_each_others_pages(pool: Backends) -> None:
    whole, halves = HostPool("page_head"), [HostPool("page_head", heads=2) for _ in range(2)]
    whole.fill([5, 6], seed=3)
    declared = {"tp_size": "2"}  # pages lie in the pool in two pieces
    one = pool.backend(whole, declared, tp_size=1)
    two = [pool.backend(half, declared, tp_rank=i, tp_size=2) for i, half in enumerate(halves)]
    assert one.batch_set_v1(names(2), indices([5, 6])) == [True] * 2
    for rank, (half, made) in enumerate(zip(halves, two, strict=True)):
        assert made.batch_exists(names(3)) == 2
        assert made.batch_get_v1(names(2), indices([8, 9])) == [True] * 2
        for segment, got in zip(whole.segments(5), half.segments(8), strict=True):
            assert np.array_equal(segment.reshape(2, -1)[rank], got)
    chain = names(4)[2:]
    for rank, (half, made) in enumerate(zip(halves, two, strict=True)):
        half.fill([1, 2], seed=rank)
        assert made.batch_set_v1(chain[: 2 - rank], indices([1, 2][: 2 - rank])) == [True] * (2 - rank)
    assert one.batch_exists(chain) == 1  # of the second page, one piece is missing
    assert one.batch_get_v1(chain, indices([0, 1])) == [True, False]
    for place, segment in enumerate(whole.segments(0)):
        assert np.array_equal(segment, np.concatenate([half.segments(1)[place] for half in halves]))


def test_exists_counts_the_chain_from_its_start(pool: Backends) -> None:
    made = pool.backend(HostPool("page_first"))
    chain = names(5)
    assert made.batch_exists(chain) == 0
    assert made.batch_set_v1([chain[0], chain[1], chain[3]], indices([0, 1, 3])) == [True] * 3
    assert made.batch_exists(chain) == 2
    assert made.batch_exists(chain[3:]) == 1
    assert made.batch_exists([]) == 0
    made.clear()
    assert made.batch_exists(chain) == 0


def test_ranks_of_an_mha_model_do_not_meet(pool: Backends) -> None:
    host = HostPool("page_first")
    ranks = [pool.backend(host, {"tp_size": "2"}, tp_rank=rank, tp_size=2) for rank in range(2)]
    ranks[0].batch_set_v1(names(3), indices([0, 1, 2]))
    assert [rank.batch_exists(names(3)) for rank in ranks] == [3, 0]


def test_ranks_of_an_mla_model_share_their_pages_which_are_written_once(pool: Backends) -> None:
    """SGLang itself lets one rank write; should others come too, the pool takes the page once."""
    host = HostPool("page_first")
    host.fill([0, 1, 2], seed=1)
    ranks = [pool.backend(host, {"tp_size": "replicated"}, tp_rank=rank, **MLA) for rank in range(2)]
    for rank in ranks:
        assert rank.batch_set_v1(names(3), indices([0, 1, 2])) == [True] * 3
    written = [rank._pages._client.counters.pages_written for rank in ranks]
    assert written == [3, 0]
    assert ranks[1].batch_get_v1(names(3), indices([5, 6, 7])) == [True] * 3
    for source, target in zip(host.segments(1), host.segments(6), strict=True):
        assert np.array_equal(source, target)


@pytest.mark.parametrize("error", [PoolUnavailable("gone"), RuntimeError("bug"), OSError("io")], ids=repr)
@pytest.mark.parametrize("step", ["connect", "call", "post", "read_pages", "write_pages"])
def test_nothing_raises_and_every_list_is_whole(pool: Backends, step: str, error: Exception) -> None:
    host = HostPool("page_first")
    made = pool.backend(host)
    made.batch_set_v1(names(9), indices(list(range(9))))

    def fail(node: str, what: str) -> None:
        if what == step:
            raise error

    pool.connector.before = fail
    for _ in range(2):
        assert 0 <= made.batch_exists(names(20)) <= 20
        for count in (0, 1, 20):
            pages = indices(list(range(count)))
            assert len(made.batch_get_v1(names(count), pages)) == count
            assert len(made.batch_set_v1(names(count), pages)) == count
    made.clear()
    assert made.get_stats() is None
    made.close()
    made.close()
    assert made.batch_get_v1(names(3), indices([0, 1, 2])) == [False] * 3
    assert made.batch_set_v1(names(3), indices([0, 1, 2])) == [False] * 3
    assert made.batch_exists(names(3)) == 0


def test_calls_that_the_pool_did_not_carry_out_are_said_now_and_then(
    pool: Backends, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = pool.backend(HostPool("page_first"))

    def fail(*_: object) -> None:
        raise PoolUnavailable("there is no pool")

    monkeypatch.setattr(page_access.RankPages, "get", fail)
    for _ in range(3):
        assert made.batch_get_v1(names(1), indices([0])) == [False]
    [line] = [record for record in caplog.records if "no pool" in record.getMessage()]
    assert (line.levelname, line.exc_info) == ("WARNING", None)


def test_arguments_that_do_not_fit_are_misses(pool: Backends) -> None:
    made = pool.backend(HostPool("page_first"))
    assert made.batch_get_v1(["not hex"], indices([0])) == [False]
    assert made.batch_set_v1(names(2), indices([0])) == [False] * 2
    assert made.batch_exists(["not hex"]) == 0


def no_addresses(indices: Any) -> Any:
    """As SGLang's index of sparse attention in layer_first."""
    raise ValueError("Unsupported layout")


@pytest.mark.parametrize(
    ("declared", "config", "kv", "parts", "says"),
    [
        ({"layout": "layer_first"}, {}, {}, {}, "layout"),
        ({"page_size": "8"}, {}, {}, {}, "page_size"),
        ({"kv_dtype": "float8_e4m3fn"}, {}, {}, {}, "bfloat16"),
        ({"tp_size": "2"}, {}, {}, {}, "tp_size 1"),
        ({}, {"is_mla_model": True}, {}, {}, "replicated"),
        ({}, {"pp_size": 2}, {}, {}, "pp_size 2"),
        (
            {"tp_size": "replicated"},
            {**MLA, "dcp_size": 2, "logical_page_size": 8},
            {},
            {},
            "decode context parallelism",
        ),
        ({"tp_size": "replicated"}, {**MLA, "attn_cp_size": 2}, {}, {}, "prefill context parallelism"),
        # bytes that are no plain FP8; the latter two have scales beside their pages
        ({"kv_dtype": "bfloat16"}, {}, {"dtype": torch.uint8}, {}, "kv-cache-dtype"),
        ({"kv_dtype": "mxfp8"}, {}, {"dtype": torch.uint8}, {}, "kv-cache-dtype"),
        ({"kv_dtype": "nvfp4"}, {}, {"dtype": torch.uint8}, {}, "kv-cache-dtype"),
        ({}, {}, {"layers": 129}, {}, r"our pages have 66,048 bytes.* 65,536 bytes at most"),
        ({}, {}, {}, {"mamba": {"page_tokens": 1}}, "keeps mamba state"),
        ({"parts": "swa:2"}, {}, {}, {"swa": {}, "draft": {}}, "keeps draft state"),
        ({"parts": "swa:2"}, {}, {}, {}, "no swa pages"),
        (
            {"parts": "swa:2"},
            {},
            {},
            {"swa": {"layout": "layer_first"}},
            "swa has layout layer_first",
        ),
        (
            {"parts": "swa:2"},
            {},
            {},
            {"swa": {"meta": no_addresses}},
            r"moves no swa pages .*Unsupported layout.* unset engine.layout",
        ),
    ],
)
def test_a_worker_with_other_pages_than_it_declared_or_than_fit_does_not_start(
    pool: Backends,
    declared: dict[str, str],
    config: dict[str, Any],
    kv: dict[str, Any],
    parts: dict[str, dict[str, Any]],
    says: str,
) -> None:
    def host(layout: str = "page_first", meta: Any = None, **options: Any) -> HostPool:
        made = HostPool(layout, **options)
        if meta is not None:
            made.get_page_buffer_meta = meta  # type: ignore[method-assign]
        return made

    def start() -> None:
        made = pool.unattached(declared, **config)
        attach(made, host(**kv), **{name: host(**options) for name, options in parts.items()})

    with pytest.raises(StartupError, match=says):
        start()


@pytest.mark.parametrize("kind", ["e4m3fn", "e5m2"])
def test_a_worker_with_fp8_pages_starts(pool: Backends, kind: str) -> None:
    """SGLang keeps them as bytes (`KVCache.store_dtype`)."""
    made = pool.unattached({"kv_dtype": f"float8_{kind}"})
    made.register_mem_pool_host(HostPool("page_first", torch.uint8))


def window(chain: list[str], host_pages: list[int] | None = None) -> PoolTransfer:
    """The transfer of a window part, as SGLang makes it."""
    found = None if host_pages is None else indices(host_pages)
    return PoolTransfer(PoolName.SWA, found, keys=chain, hit_policy=PoolHitPolicy.TRAILING_PAGES)


@pytest.mark.parametrize("layout", ["page_first", "layer_first"])
def test_parts_of_other_sizes_come_back_into_their_own_host_pools(pool: Backends, layout: str) -> None:
    hosts = [HostPool(layout) for _ in range(2)]
    windows = [HostPool(layout, layers=5) for _ in range(2)]
    hosts[0].fill(list(range(9)), seed=1)
    windows[0].fill(list(range(2)), seed=2)
    one, two = (pool.backend(host, SWA, {"swa": part}) for host, part in zip(hosts, windows, strict=True))
    chain = names(9)
    assert one.batch_set_v2([window(chain[7:], [0, 1])]) == {"swa": [True] * 2}
    assert one.batch_set_v1(chain, indices(list(range(9)))) == [True] * 9
    found = two.batch_exists_v2(names(11), [window(["?", "?"])])
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (9, [9])
    assert found.extra_pool_hit_pages == {"kv": 9, "swa": 9}
    assert two.batch_get_v1(chain, indices(list(range(50, 59)))) == [True] * 9
    assert two.batch_get_v2([window(chain[7:], [30, 31])]) == {PoolName.SWA: [True] * 2}
    for source, target in zip(windows[0].segments(1), windows[1].segments(31), strict=True):
        assert source.any()
        assert np.array_equal(source, target)
    assert np.array_equal(hosts[0].segments(8)[0], hosts[1].segments(58)[0])


def test_a_lookup_of_all_parts_is_one_question(pool: Backends) -> None:
    made = pool.backend(HostPool("page_first"), SWA, {"swa": HostPool("page_first", layers=5)})
    pages = indices(list(range(30)))
    made.batch_set_v1(names(30), pages)
    made.batch_set_v2([window(names(30), list(range(30)))])
    asked: list[str] = []
    pool.connector.before = lambda node, what: asked.append(node)
    assert made.batch_exists_v2(names(30), [window(["?", "?"])]).kv_hit_pages == 30
    assert len(asked) == 1


def test_nothing_of_interface_v2_raises_and_every_list_is_whole(pool: Backends) -> None:
    made = pool.backend(HostPool("page_first"), SWA, {"swa": HostPool("page_first", layers=5)})
    unknown = PoolTransfer(PoolName.MAMBA, indices([0]), keys=names(1))
    short = window(names(2), [0])
    nowhere = window(names(2))
    for transfers in ([unknown, short], [short, nowhere, unknown], []):
        expected = {one.name: [False] * len(one.keys or ()) for one in transfers}
        assert made.batch_set_v2(transfers) == expected
        assert made.batch_get_v2(transfers) == expected
    assert made.batch_exists_v2(names(3), [unknown]) == PoolTransferResult(0, {}, [])
    assert made.batch_exists_v2(["not hex"], [window(["?"])]) == PoolTransferResult(0, {}, [])
    made.close()
    assert made.batch_exists_v2(names(3), [window(["?"])]).kv_hit_pages == 0


def test_ranks_keep_their_own_parts(pool: Backends) -> None:
    host, windows = HostPool("page_first"), HostPool("page_first", layers=5)
    declared = {"tp_size": "2", **SWA}
    ranks = [pool.backend(host, declared, {"swa": windows}, tp_rank=rank, tp_size=2) for rank in range(2)]
    for rank in ranks:
        rank.batch_set_v1(names(4), indices([0, 1, 2, 3]))
    ranks[0].batch_set_v2([window(names(4)[:3], [0, 1, 2])])
    ranks[1].batch_set_v2([window(names(4)[1:], [0, 1, 2])])
    found = [rank.batch_exists_v2(names(4), [window(["?", "?"])]) for rank in ranks]
    # SGLang takes what all ranks can restore: three pages, though each could more, or other lengths, alone
    assert [one.restorable_prefix_pages for one in found] == [[1, 2, 3], [3, 4]]


def test_a_draft_model_is_registered_after_all_others_and_then_pages_move(pool: Backends) -> None:
    made = pool.backend(HostPool("page_first"), {"parts": "draft:0"})
    chain, pages = names(2), indices([0, 1])
    draft = [PoolTransfer(PoolName.DRAFT, pages, keys=chain)]
    assert made.batch_set_v1(chain, pages) == [False] * 2
    assert made.batch_exists_v2(chain, draft) == PoolTransferResult(0, {}, [])
    made.register_mem_host_pool_v2(HostPool("page_first", layers=1), PoolName.DRAFT)
    assert made.batch_set_v1(chain, pages) == [True] * 2
    assert made.batch_exists_v2(chain, draft).restorable_prefix_pages == []
    assert made.batch_set_v2(draft) == {"draft": [True] * 2}
    assert made.batch_exists_v2(chain, draft).restorable_prefix_pages == [1, 2]


def test_an_index_that_all_pages_have_goes_with_kv_as_sglang_moves_it(pool: Backends) -> None:
    """The calls of `HybridCacheController` for a pool with `indices_from_pool = KV`: written whole before KV,
    read after each batch of KV, at the same places. MLA's ranks share it.
    """
    ranks = []
    for rank in range(2):
        host, index = HostPool("page_first"), HostPool("page_first", layers=1)
        declared = {"tp_size": "replicated", "parts": "indexer:0"}
        made = pool.backend(host, declared, {"indexer": index}, tp_rank=rank, **MLA)
        ranks.append((made, host, index))
    (writer, host, index), (reader, host_of_reader, index_of_reader) = ranks
    host.fill(list(range(6)), seed=1)
    index.fill(list(range(6)), seed=2)
    whole = PoolTransfer(PoolName.INDEXER, indices(list(range(6))), keys=names(6))
    assert writer.batch_set_v2([whole]) == {PoolName.INDEXER: [True] * 6}
    assert writer.batch_set_v1(names(6), indices(list(range(6)))) == [True] * 6
    derived = PoolTransfer(PoolName.INDEXER, indices_from_pool=PoolName.KV)
    assert reader.batch_exists_v2(names(7), [derived]).restorable_prefix_pages == [1, 2, 3, 4, 5, 6]
    for batch in ([0, 1, 2, 3], [4, 5]):
        keys_of_batch, places = [names(6)[page] for page in batch], indices([page + 40 for page in batch])
        assert reader.batch_get_v1(keys_of_batch, places) == [True] * len(batch)
        moved = reader.batch_get_v2([PoolTransfer(PoolName.INDEXER, places, keys=keys_of_batch)])
        assert moved == {PoolName.INDEXER: [True] * len(batch)}
    assert np.array_equal(host.segments(5)[0], host_of_reader.segments(45)[0])
    assert np.array_equal(index.segments(5)[1], index_of_reader.segments(45)[1])


def test_a_state_is_kept_for_the_end_of_a_prefix_and_by_each_rank_of_mla(pool: Backends) -> None:
    """The calls of SGLang's `MambaComponent`: a node's state has one place in host memory, and the key of the
    node's last page. Ranks divide it though they share the pages of KV, which the first alone writes.
    """
    ranks = []
    for rank in range(2):
        states = HostPool("page_first", layers=7, page_tokens=1)
        declared = {"tp_size": "replicated", "parts": "mamba:1"}
        made = pool.backend(HostPool("page_first"), declared, {"mamba": states}, tp_rank=rank, **MLA)
        ranks.append((made, states))

    def state(page: int, place: int) -> PoolTransfer:
        keys, policy = names(6)[page : page + 1], PoolHitPolicy.TRAILING_PAGES
        return PoolTransfer(PoolName.MAMBA, torch.tensor([place]), keys=keys, hit_policy=policy)

    for rank, (made, states) in enumerate(ranks):
        states.fill([0, 1], seed=rank)
        assert made.batch_set_v2([state(2, 0)]) == {PoolName.MAMBA: [True]}
    ranks[0][0].batch_set_v2([state(4, 1)])
    ranks[0][0].batch_set_v1(names(6), indices(list(range(6))))
    asked = PoolTransfer(PoolName.MAMBA, keys=["?"], hit_policy=PoolHitPolicy.TRAILING_PAGES)
    found = [made.batch_exists_v2(names(6), [asked]).restorable_prefix_pages for made, _ in ranks]
    assert found == [[3, 5], [3]]  # SGLang restores what all ranks can: three pages
    for made, states in ranks:
        assert made.batch_get_v2([state(2, 9)]) == {PoolName.MAMBA: [True]}
        assert np.array_equal(states.segments(0)[1], states.segments(9)[1])
    assert not np.array_equal(ranks[0][1].segments(9)[0], ranks[1][1].segments(9)[0])


@given(st.data(), st.integers(0, 12), st.integers(1, 4))
def test_a_lookup_answers_what_sglangs_own_file_backend_does(
    data: Any, pages: int, window_pages: int
) -> None:
    chain = [f"{page:02}" for page in range(pages)]
    some = st.lists(st.booleans(), min_size=pages, max_size=pages)
    present = {name: data.draw(some) for name in (PoolName.KV, PoolName.SWA, PoolName.INDEXER)}
    files = {
        f"{key}.{name}.bin" for name, there in present.items() for key in itertools.compress(chain, there)
    }
    file_backend: Any = object.__new__(HiCacheFile)
    file_backend._collect_existing_component_keys = lambda keys, transfers: files
    file_backend._get_component_key = lambda key, name=PoolName.KV: f"{key}.{name}"
    transfers = [window(["?"] * window_pages), PoolTransfer(PoolName.INDEXER)]
    windows = {"kv": 0, **{str(one.name): hicache_backend.window_pages(one) for one in transfers}}
    found = hicache_backend.lookup_result(windows, list(present.values()))
    expected = file_backend.batch_exists_v2(chain, transfers)
    assert found.kv_hit_pages == expected.kv_hit_pages
    assert found.restorable_prefix_pages == expected.restorable_prefix_pages
    if expected.restorable_prefix_pages:  # it stops counting where nothing is left
        assert found.extra_pool_hit_pages == expected.extra_pool_hit_pages
