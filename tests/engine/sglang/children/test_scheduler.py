"""What is changed in SGLang's scheduler: of its methods, seen beside scripted parts of it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.schedule_batch import FINISH_MATCHED_STR, Req

from pdserve.engine.sglang.children.scheduler import (
    POOL_ROOM,
    PULL_ID,
    earliest_stop,
    prompts_kept,
    pulls_ended,
    salted,
    salts_taken,
)
from tests.support.processes import free_ports

# --- kept prompts


@pytest.mark.parametrize(
    ("room", "is_kept"),
    [(None, False), (0, False), (POOL_ROOM - 1, False), (POOL_ROOM, True), (POOL_ROOM + 3, True)],
)
def test_only_prompts_for_the_pool_are_kept(room: int | None, is_kept: bool) -> None:
    """SGLang's own warm-ups are not."""
    request = SimpleNamespace(bootstrap_room=room, skip_radix_cache_insert=True)
    seen = []

    def create_sender(queue: object, req: Any, num_kv_heads: int) -> bool:
        seen.append((queue, req.skip_radix_cache_insert, num_kv_heads))
        return False

    assert prompts_kept(create_sender)("queue", request, 8) is False
    assert seen == [("queue", not is_kept, 8)]


# --- pulls


@dataclass
class Pull:
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

    waiting_queue: list[Pull]
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
    slow, fast, nothing, real = (Pull(rid) for rid in (f"{PULL_ID}1", f"{PULL_ID}2", f"{PULL_ID}3", "r"))
    scheduler = Scheduler(
        [slow, fast, nothing, real],
        {slow.cache_request_handle, fast.cache_request_handle},
        {fast.cache_request_handle},
    )
    pulls_ended(Scheduler.events)(scheduler, should_retry_storage_prefetch=False)
    assert scheduler.waiting_queue == [slow, real]
    scheduler.fetching.clear()
    pulls_ended(Scheduler.events)(scheduler)
    assert scheduler.waiting_queue == [real]


def test_a_pull_whose_pages_wait_for_it_alone_is_let_through_to_the_device_if_all_came() -> None:
    whole, behind_others, short, nothing = (Pull(f"{PULL_ID}{i}") for i in range(4))
    scheduler = Scheduler([whole, behind_others, short, nothing])
    scheduler.staged = {
        whole.cache_request_handle: (0, 8),
        behind_others.cache_request_handle: (4, 8),
        short.cache_request_handle: (0, 4),
    }
    pulls_ended(Scheduler.events)(scheduler)
    assert scheduler.waiting_queue == [whole, behind_others]
    del scheduler.staged[whole.cache_request_handle]  # SGLang gave up to bring them to the device
    pulls_ended(Scheduler.events)(scheduler)
    assert scheduler.waiting_queue == [behind_others]


# --- embedding salts


@pytest.mark.parametrize("salt", [None, "tenant/acme", "tenant/acme/\0\"'ü"])
@pytest.mark.parametrize("lora_name", [None, "adapter", salted(None, "tenant/victim")])
def test_the_scheduler_gets_salt_and_adapter_and_no_client_chooses_a_salt_by_an_adapters_name(
    salt: str | None, lora_name: str | None
) -> None:
    request, seen = SimpleNamespace(cache_salt=None), list[Any]()
    salts_taken(lambda *given: seen.append(given))("scheduler", request, salted(lora_name, salt))
    assert seen == [("scheduler", request, "adapter" if lora_name == "adapter" else None)]
    assert request.cache_salt == salt


# --- stop strings

WORDS = ["The", " capital", " of", " France", " is", " Paris"]


class Words:
    """A tokenizer whose token ids are numbers of words."""

    def decode(self, ids: list[int]) -> str:
        return "".join(WORDS[one] for one in ids)


def finished(stops: list[str], ids: list[int], accepted: int = 1) -> Any:
    """An SGLang request with these output tokens, the last of them new, after its check."""
    req = Req.__new__(Req)
    req.sampling_params = SimpleNamespace(
        stop_strs=stops, stop_regex_strs=[], stop_str_max_len=8, stop_regex_max_len=0
    )
    req.tokenizer, req.output_ids, req.decoded_text = Words(), ids, ""
    req.finished_reason, req.finished_len = None, None
    earliest_stop(Req._check_str_based_finish, lambda stop: FINISH_MATCHED_STR(matched=stop))(req, accepted)
    return req


@pytest.mark.parametrize(
    ("stops", "answer", "accepted", "ends"),
    [
        # of stop strings that one token completes the one that begins first
        (["of France", "capital of F"], 4, 1, "capital of F"),
        (["capital of F", "of France"], 4, 1, "capital of F"),
        # of several tokens of one step the first that completes a stop string
        (["capital of France", "of", " is"], 5, 4, "of"),
        (["Paris"], 6, 1, "Paris"),  # one stop string is SGLang's own affair
        (["Rome", "Oslo"], 6, 1, None),
    ],
)
def test_the_first_stop_string_in_the_text_ends_an_answer(
    stops: list[str], answer: int, accepted: int, ends: str | None
) -> None:
    req = finished(stops, list(range(answer)), accepted)
    assert getattr(req.finished_reason, "matched", None) == ends
    if ends == "of":
        assert req.finished_len == 3


# --- local store

RANKS = """
import os, sys
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
import torch.distributed as d
from pdserve.engine.sglang.children import scheduler
scheduler.serve_stores_locally(); scheduler.serve_stores_locally()
from torch.distributed.rendezvous import rendezvous
store, rank, world = next(rendezvous(f"tcp://0.0.0.0:{sys.argv[1]}", rank=0, world_size=1))
again, *_ = next(rendezvous(f"tcp://127.0.0.1:{sys.argv[1]}", rank=0, world_size=1))
store.set("a", "b")
d.init_process_group("gloo", store=d.PrefixStore("p", again), rank=0, world_size=1)
import psutil
found = [one.laddr for one in psutil.Process().net_connections("tcp") if one.status == "LISTEN"]
print(sorted({one.ip for one in found}), store.get("a").decode(), again.get("a").decode())
"""


def test_a_process_group_of_one_host_listens_on_loopback() -> None:
    """As SGLang makes it, by a rendezvous at a TCP address; torch alone listens on all interfaces."""
    [port] = free_ports(1)
    done = subprocess.run(
        [sys.executable, "-c", RANKS, str(port)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout == "['127.0.0.1'] b b\n", done.stderr
