"""What Dynamo's router is told of the pool: the layout that makes the very names of the pool's events."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from pdserve.integrations.dynamo.worker import shared_cache
from pdserve.kvpool.protocol.kv_events import object_key
from pdserve.pages import KvGeometry, page_hashes

GEOMETRY = KvGeometry(
    model="m", dtype="d", kv_dtype="d", page_size="64", layout="page_first", tp_size="1", pp_size="1"
)
EVENTS = "tcp://127.0.0.1:5557"


def names_of_dynamo(said: dict[str, object], page: str) -> list[str]:
    """As version 1.6.1 makes them of models with latent attention (`shared_cache.rs: derived_query_keys`)."""
    assert said["is_mla_model"] is True
    assert said["pp_size"] == 1
    return [f"{said['key_prefix']}_{page}__k"]


def names_of_later(said: dict[str, object], page: str) -> list[str]:
    """As later versions make them (`required_page_keys`)."""
    layout: dict[str, object] = said["hicache_object_layout"]  # type: ignore[assignment]
    pools: list[dict[str, list[str]]] = layout["pools"]  # type: ignore[assignment]
    return [f"{layout['key_prefix']}_{page}{suffix}" for pool in pools for suffix in pool["suffixes"]]


@pytest.mark.parametrize("tp_size", ["1", "replicated"])
def test_dynamo_makes_the_names_of_the_pools_events(tp_size: str) -> None:
    said = shared_cache("m@1", replace(GEOMETRY, tp_size=tp_size), pairs=False, events=EVENTS)
    assert said is not None
    [page] = page_hashes(range(64), 64)
    expected = [object_key("m@1", page)]
    assert names_of_dynamo(said, page.hex()) == names_of_later(said, page.hex()) == expected
    assert (said["backend"], said["page_size"], said["kv_events_endpoint"]) == ("mooncake", 64, EVENTS)


@pytest.mark.parametrize(
    "fields", [{"tp_size": "2"}, {"pp_size": "2"}, {"parts": "swa:2"}, {"parts": "draft:0"}]
)
def test_pages_that_it_cannot_name_are_not_told(fields: dict[str, str]) -> None:
    assert shared_cache("m@1", replace(GEOMETRY, **fields), pairs=False, events=EVENTS) is None


def test_without_events_there_is_nothing_to_tell() -> None:
    assert shared_cache("m@1", GEOMETRY, pairs=False, events="") is None
