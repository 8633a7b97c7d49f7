"""The limit on bodies from what workers say of their model."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.router.config.limits import Limits
from pdserve.router.fleet.registry import Fleet
from pdserve.router.fleet.worker import (
    LARGEST_BODY_BYTES,
    SMALLEST_BODY_BYTES,
    Worker,
    WorkerInfo,
    body_limit_bytes,
)
from tests.support.router.harness import CHAT, disagg
from tests.support.router.mock_worker import MockWorker


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


# --- Bodies that cannot fit are refused before any worker sees them


def knowing(role: str) -> MockWorker:
    return MockWorker(role, is_multimodal=False)


async def test_bodies_are_bounded_by_the_context_length_unless_the_configuration_says_otherwise() -> None:
    content = "x" * SMALLEST_BODY_BYTES
    body = {"model": "m", "messages": [{"role": "user", "content": content}]}
    async with disagg(make=knowing) as (harness, _, [decode]):
        response = await harness.post(CHAT, body)
        assert (response.status, response.error["code"]) == (413, "body_too_large")
        assert decode.requests == []
    async with disagg(make=knowing, limits=Limits(body_bytes=2 * SMALLEST_BODY_BYTES)) as (harness, _, _):
        assert (await harness.post(CHAT, body)).status == 200
    async with disagg() as (harness, _, _):  # workers that do not say
        assert (await harness.post(CHAT, body)).status == 200
