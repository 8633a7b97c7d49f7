"""The layout of the pool's objects, merged by SGLang's own code as for its route."""

from __future__ import annotations

import pytest
from sglang.srt.mem_cache.hicache_storage import merge_l3_layouts

from pdserve.kvpool.hicache.object_layout import object_layout
from pdserve.kvpool.protocol.kv_events import object_key
from pdserve.pages import KvGeometry, page_hashes


def geometry(**fields: str) -> KvGeometry:
    plain = {"model": "m", "dtype": "d", "kv_dtype": "d", "page_size": "64", "layout": "page_first"}
    return KvGeometry(**{**plain, "tp_size": "1", "pp_size": "1", **fields})


def test_the_layout_gives_the_names_of_a_nodes_events() -> None:
    merged = merge_l3_layouts([object_layout("m@1", geometry(tp_size="replicated"))] * 2)
    assert merged is not None
    assert merged["enabled"]
    assert merged["page_size"] == 64
    [page] = page_hashes(range(64), 64)
    layout = merged["hicache_object_layout"]
    [pool] = layout["pools"]
    assert pool["hit_policy"] == "all_pages"
    assert [f"{layout['key_prefix']}_{page.hex()}{s}" for s in pool["suffixes"]] == [object_key("m@1", page)]


@pytest.mark.parametrize("fields", [{"tp_size": "2"}, {"pp_size": "2"}, {"parts": "swa:2"}])
def test_objects_that_others_cannot_name_have_no_layout(fields: dict[str, str]) -> None:
    said = object_layout("m@1", geometry(**fields))
    assert not said["enabled"]
    assert said["reason"]
    assert said["hicache_object_layout"]["pools"] == []
