"""Tokens that the pool had on SSD, by SGLang's request, against its two methods scripted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pdserve.engine.sglang.children.ssd_tokens import MAX_REQUESTS, SsdTokens
from pdserve.kvpool.hicache.ssd_pages import came_from_ssd


class Sglang:
    """A cache controller and an output streamer as far as they are looked at."""

    def __init__(self) -> None:
        tokens = SsdTokens()
        self.controller: Any = SimpleNamespace(page_size=64)
        self.ssd = 0
        self.get = tokens.counting(self._get)
        self.told = tokens.telling(lambda streamer, req: req.details and dict(req.details))

    def _get(self, controller: Any, operation: Any, pages: int) -> int:
        came_from_ssd(self.ssd)
        return pages

    def read(self, rid: str, pages: int, ssd: int) -> None:
        """A batch of which so many pages from its start are there, and so many came from SSD."""
        self.ssd = ssd
        assert self.get(self.controller, SimpleNamespace(request_id=rid), pages) == pages

    def details(self, rid: str, storage: int | None) -> dict[str, int] | None:
        details = None if storage is None else {"device": 7, "host": 0, "storage": storage}
        return self.told(None, SimpleNamespace(rid=rid, details=details))


def test_the_batches_of_a_request_are_added_up() -> None:
    sglang = Sglang()
    sglang.read("a", 128, 3)
    sglang.read("b", 10, 0)
    sglang.read("a", 10, 10)
    assert sglang.details("a", 138 * 64) == {"device": 7, "host": 0, "storage": 138 * 64, "ssd": 13 * 64}
    assert sglang.details("b", 640) == {"device": 7, "host": 0, "storage": 640}


@pytest.mark.parametrize(("pages", "storage", "ssd"), [(2, 640, 128), (10, 64, 64), (10, 0, 0)])
def test_what_was_read_and_not_used_does_not_count(pages: int, storage: int, ssd: int) -> None:
    sglang = Sglang()
    sglang.read("a", pages, 10)
    assert sglang.details("a", storage) == {"device": 7, "host": 0, "storage": storage, "ssd": ssd}
    assert sglang.details("a", None) is None


def test_another_storage_backend_has_none_and_old_requests_are_forgotten() -> None:
    sglang = Sglang()
    assert sglang.get(sglang.controller, SimpleNamespace(request_id="a"), 5) == 5
    for number in range(MAX_REQUESTS + 1):
        sglang.read(f"r{number}", 1, 1)
    assert sglang.details("a", 64) == sglang.details("r0", 64) == {"device": 7, "host": 0, "storage": 64}
    assert sglang.details(f"r{MAX_REQUESTS}", 64) == {"device": 7, "host": 0, "storage": 64, "ssd": 64}
