"""SGLang's storage backend on other stores than pool nodes, by a page mover: the example, real Mooncake."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

from pdserve.errors import StartupError
from pdserve.kvpool.client.config import PoolClientConfig
from pdserve.kvpool.hicache.backend import PdserveHiCache
from pdserve.pages import KvGeometry
from pdserve.tokens import reveal
from tests.support.kvpool.faulty import keys
from tests.support.kvpool.host_pool import PAGE_TOKENS, HostPool, indices
from tests.support.kvpool.page_stores import MIB, install
from tests.support.mooncake import is_installed, mooncake_servers

GEOMETRY = KvGeometry(
    model="m",
    dtype="bfloat16",
    kv_dtype="bfloat16",
    page_size=str(PAGE_TOKENS),
    layout="layer_first",
    tp_size="1",
    pp_size="1",
)
NAMES = [key.hex() for key in keys(20)]


@pytest.fixture(params=["example", "mooncake"])
def config(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[PoolClientConfig]:
    if request.param == "example":
        install("example", "docs.examples.store:DirectoryStore", tmp_path, monkeypatch)
        yield PoolClientConfig(engine="example", options={"path": str(tmp_path)})
        return
    if not is_installed():
        pytest.skip("MOONCAKE IS NOT TESTED: pip install '.[mooncake]' to test pool.engine = \"mooncake\"")
    install("mooncake", "pdserve.kvpool.stores.mooncake:MooncakeStore", tmp_path, monkeypatch)
    with mooncake_servers(64 * MIB, tmp_path) as master:
        yield PoolClientConfig(engine="mooncake", options={"master": master})


def backend(config: PoolClientConfig, host: HostPool) -> Any:
    pool = msgspec.to_builtins(config, enc_hook=reveal)
    settings = {"pool": pool, "namespace": "ns", "geometry": GEOMETRY.as_dict()}
    fields: dict[str, Any] = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1}
    fields |= {"attn_cp_rank": 0, "attn_cp_size": 1, "is_mla_model": False, "enable_storage_metrics": False}
    fields |= {"is_page_first_layout": False, "model_name": "m", "extra_config": {"pdserve": settings}}
    made = PdserveHiCache(HiCacheStorageConfig(**fields), {})
    made.register_mem_pool_host(host)
    made.on_host_pools_registered()
    return made


def test_pages_of_one_worker_come_back_into_host_pages_of_another(config: PoolClientConfig) -> None:
    writer, reader = HostPool("layer_first", shared=True), HostPool("layer_first", shared=True)
    sources, targets = list(range(20)), list(range(99, 79, -1))
    writer.fill(sources, seed=1)
    one, two = backend(config, writer), backend(config, reader)
    try:
        assert two.batch_exists(NAMES) == 0
        assert one.batch_set_v1(NAMES, indices(sources)) == [True] * 20
        assert two.batch_exists(NAMES) == 20
        assert two.batch_get_v1(NAMES, indices(targets)) == [True] * 20
        for source, target in zip(sources, targets, strict=True):
            pairs = zip(writer.segments(source), reader.segments(target), strict=True)
            assert all(np.array_equal(a, b) for a, b in pairs)
    finally:
        one.close()
        two.close()


def test_host_memory_that_no_mover_can_map_is_refused(config: PoolClientConfig) -> None:
    with pytest.raises(StartupError, match="hangs could not be ended: use pool nodes here"):
        backend(config, HostPool("layer_first"))
