"""The limit on bodies from what workers say of their model."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.router.fleet.registry import Fleet
from pdserve.router.fleet.worker import (
    LARGEST_BODY_BYTES,
    SMALLEST_BODY_BYTES,
    Worker,
    WorkerInfo,
    body_limit_bytes,
)


def info(**fields: Any) -> WorkerInfo:
    known: dict[str, Any] = {"context_length": 4096, "is_multimodal": False}
    return WorkerInfo(role="decode", model="m", **(known | fields))


@pytest.mark.parametrize(
    ("workers", "expected_bytes"),
    [
        ([], LARGEST_BODY_BYTES),
        ([{}], SMALLEST_BODY_BYTES),
        ([{"context_length": 131072}], 8 * 1024 * 1024),
        ([{"context_length": 10_000_000}], LARGEST_BODY_BYTES),
        ([{}, {"context_length": 131072}], 8 * 1024 * 1024),
        ([{}, {"is_multimodal": True}], LARGEST_BODY_BYTES),
        ([{}, {"is_multimodal": None}], LARGEST_BODY_BYTES),
        ([{}, {"tasks": ("embed",)}], LARGEST_BODY_BYTES),
        ([{"context_length": 0}], LARGEST_BODY_BYTES),
    ],
)
def test_the_bound_on_bodies_follows_from_the_longest_context(
    workers: list[dict[str, Any]], expected_bytes: int
) -> None:
    assert body_limit_bytes([info(**fields) for fields in workers]) == expected_bytes


def test_a_fleet_has_a_limit_once_workers_have_said_it_and_refused_ones_do_not_count() -> None:
    fleet = Fleet([Worker("decode", "http://h0:1"), Worker("decode", "http://h1:1")])
    assert fleet.body_limit_bytes == LARGEST_BODY_BYTES
    first, second = fleet.workers
    assert fleet.on_info(first, info()) is None
    assert fleet.body_limit_bytes == SMALLEST_BODY_BYTES
    assert fleet.on_info(second, info(namespace="other", is_multimodal=True)) is not None
    assert fleet.body_limit_bytes == SMALLEST_BODY_BYTES
