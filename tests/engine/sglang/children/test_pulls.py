"""Requests that only fetch are never computed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pdserve.engine.sglang.children.pulls import PULL_ID, ending_pulls


@dataclass
class Request:
    """`origin_input_ids`: two pages and a token, of pages of four."""

    rid: str
    origin_input_ids: tuple[int, ...] = (7,) * 9

    @property
    def cache_request_handle(self) -> str:
        return f"handle of {self.rid}"


@dataclass
class Scheduler:
    """The part of SGLang's that is looked at. `fetching`: handles whose pages are on their way; `staged`:
    whose pages wait in host memory of their own, from and to which token.
    """

    waiting_queue: list[Request]
    fetching: set[str] = field(default_factory=set)
    done_by_events: set[str] = field(default_factory=set)
    staged: dict[str, tuple[int, int]] = field(default_factory=dict)
    page_size: int = 4

    @property
    def tree_cache(self) -> Scheduler:
        return self

    def has_ongoing_prefetch(self, handle: str) -> bool:
        return handle in self.fetching

    def waiting_storage_span(self, handle: str) -> tuple[int, int] | None:
        return self.staged.get(handle)

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


def test_a_pull_whose_pages_wait_for_it_alone_is_let_through_to_the_device_if_all_came() -> None:
    whole, behind_others, short, nothing = (Request(f"{PULL_ID}{i}") for i in range(4))
    scheduler = Scheduler([whole, behind_others, short, nothing])
    scheduler.staged = {
        whole.cache_request_handle: (0, 8),
        behind_others.cache_request_handle: (4, 8),
        short.cache_request_handle: (0, 4),
    }
    ending_pulls(Scheduler.events)(scheduler)
    assert scheduler.waiting_queue == [whole, behind_others]
    del scheduler.staged[whole.cache_request_handle]  # SGLang gave up to bring them to the device
    ending_pulls(Scheduler.events)(scheduler)
    assert scheduler.waiting_queue == [behind_others]
