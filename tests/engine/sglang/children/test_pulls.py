"""Requests that only fetch are never computed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pdserve.engine.sglang.children.pulls import PULL_ID, ending_pulls


@dataclass
class Request:
    rid: str

    @property
    def cache_request_handle(self) -> str:
        return f"handle of {self.rid}"


@dataclass
class Scheduler:
    """The part of SGLang's that is looked at. `fetching`: handles whose pages are on their way."""

    waiting_queue: list[Request]
    fetching: set[str] = field(default_factory=set)
    done_by_events: set[str] = field(default_factory=set)

    @property
    def tree_cache(self) -> Scheduler:
        return self

    def has_ongoing_prefetch(self, handle: str) -> bool:
        return handle in self.fetching

    def abort_request(self, asked: Any) -> None:
        self.waiting_queue = [one for one in self.waiting_queue if not one.rid.startswith(asked.rid)]

    def events(self, should_retry_storage_prefetch: bool = True) -> None:
        self.fetching -= self.done_by_events


def test_a_pull_leaves_the_queue_when_its_fetch_is_over_and_others_stay() -> None:
    slow, fast, nothing, real = (Request(rid) for rid in (f"{PULL_ID}1", f"{PULL_ID}2", f"{PULL_ID}3", "r"))
    scheduler = Scheduler(
        [slow, fast, nothing, real],
        {slow.cache_request_handle, fast.cache_request_handle},
        {fast.cache_request_handle},
    )
    ending_pulls(Scheduler.events)(scheduler, should_retry_storage_prefetch=False)
    assert scheduler.waiting_queue == [slow, real]
    scheduler.fetching.clear()
    ending_pulls(Scheduler.events)(scheduler)
    assert scheduler.waiting_queue == [real]
