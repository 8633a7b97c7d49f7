"""Limits on text and bodies from what workers say of their model."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.router.fleet.registry import Fleet
from pdserve.router.fleet.text_limits import (
    LARGEST_BODY_BYTES,
    NO_LIMIT,
    SMALLEST_BODY_BYTES,
    TextLimit,
    body_limit_bytes,
    text_limit,
)
from pdserve.router.fleet.worker import Worker, WorkerInfo
from pdserve.text_bound import TextBound


def info(**fields: Any) -> WorkerInfo:
    known: dict[str, Any] = {"context_length": 4096, "longest_token_bytes": 70, "is_multimodal": False}
    return WorkerInfo(role="decode", model="m", **(known | fields))


def test_the_limit_is_that_of_the_worker_that_takes_most() -> None:
    assert text_limit([info()]) == TextLimit(4096, TextBound(70))
    several = [info(), info(context_length=8192), info(longest_token_bytes=90), info(text_shrink=4)]
    assert text_limit(several) == TextLimit(8192, TextBound(90, 4))


@pytest.mark.parametrize("other", [{"longest_token_bytes": 0}, {"context_length": 0}, {"text_shrink": 0}])
def test_a_worker_that_says_no_bound_takes_all_texts(other: dict[str, Any]) -> None:
    assert not text_limit([info(), info(**other)]).bound
    assert not text_limit([]).bound


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


def test_a_fleet_has_limits_once_workers_have_said_them_and_refused_ones_do_not_count() -> None:
    fleet = Fleet([Worker("decode", "http://h0:1"), Worker("decode", "http://h1:1")])
    assert (fleet.text_limit("m"), fleet.body_limit_bytes) == (NO_LIMIT, LARGEST_BODY_BYTES)
    first, second = fleet.workers
    assert fleet.on_info(first, info()) is None
    assert (fleet.text_limit("m"), fleet.body_limit_bytes) == (TextLimit(4096, TextBound(70)), 4 * 1024**2)
    assert fleet.on_info(second, info(namespace="other", longest_token_bytes=0)) is not None
    assert fleet.text_limit("m") == TextLimit(4096, TextBound(70))
    assert fleet.text_limit("unknown") == NO_LIMIT
