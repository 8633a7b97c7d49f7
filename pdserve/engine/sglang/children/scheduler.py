"""What is changed in SGLang's scheduler processes (0.5.23), each for want of a parameter.

| method of SGLang | change |
|---|---|
| `PrefillBootstrapQueue.create_sender` | pages of prompts in the room `POOL_ROOM` are kept |
| `Scheduler._process_hicache_events` | requests that only fetch end when their pages have come |
| `Scheduler._record_kv_event_lora_name` | requests for embeddings get their `cache_salt` |
| `UnifiedRadixCache`, `Scheduler._process_hicache_events` | fetches begin a step sooner, and are counted |
| `Scheduler._add_request_to_queue` | answers go on behind a first token that another worker has sampled |
| `Req._check_str_based_finish` | of several stop strings the first in the text ends it |
| `UnifiedRadixCache` | what it looks up and stores says whose it is |
| `torch.distributed.TCPStore` | serves loopback only where all ranks are on one host |

Importing this module imports neither SGLang nor torch: the worker's own process takes from it how it names
what it asks of the scheduler.

Whose pages a scheduler process looks up and stores: SGLang has the salt of a request, which
names the tenant, in its tree of pages, and gives it to no storage backend. kvpool/hicache/owners.py has how
it is said.

| method of SGLang | change |
|---|---|
| `UnifiedRadixCache.prefetch_from_storage`, `query_storage_hit_length` | look up the tenant's pages |
| `UnifiedRadixCache.__init__` | its `tree_core` marks what it gives to be stored |
"""

from __future__ import annotations

import functools
import importlib
import json
import socket
from collections.abc import Callable
from typing import Any, Final

import msgspec

from pdserve.engine.sglang.children.fetches import PULL_ID, Declined, Fetches, FetchMetrics
from pdserve.engine.sglang.children.first_tokens import first_tokens_given
from pdserve.kvpool.hicache.owners import marked
from pdserve.kvpool.namespaces.tenants import tenant_of

POOL_ROOM: Final = 2**62
"""Of prompts that a worker in SGLang's prefill mode computes for the pool and sends to nobody. The rooms of
two workers are below it. Several prompts of a request have it and those above it.
"""
LOOPBACK: Final = "127.0.0.1"
BACKLOG: Final = 2048  # as torch has
_SALT: Final = "\0pdserve-salt:"  # no name of an adapter begins so; see `salted`
_MARK: Final = "__pdserve__"


def change(*, is_on_one_host: bool) -> None:
    """Make all changes in this process, once, before its scheduler is made; again is a no-op. Imports
    SGLang's scheduler. `is_on_one_host`: all ranks of the worker are.
    """
    from sglang.srt.disaggregation.prefill import PrefillBootstrapQueue
    from sglang.srt.managers.schedule_batch import FINISH_MATCHED_STR, Req
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    _replace(PrefillBootstrapQueue, "create_sender", prompts_kept)
    metrics = FetchMetrics()
    fetches = Fetches(metrics.steps)
    _replace(Scheduler, "_process_hicache_events", lambda process: pulls_ended(fetches.stepped(process)))
    _replace(Scheduler, "_record_kv_event_lora_name", salts_taken)
    _replace(Scheduler, "_add_request_to_queue", first_tokens_given)
    _replace(UnifiedRadixCache, "prefetch_outcome_stats_snapshot", Declined(metrics.declined).counted)
    _replace(UnifiedRadixCache, "pop_prefetch_loaded_span", fetches.admitted)
    _replace(UnifiedRadixCache, "prefetch_from_storage", lambda ask: fetches.asked(lookups_marked(4)(ask)))
    _replace(UnifiedRadixCache, "query_storage_hit_length", lookups_marked(3))
    _replace(UnifiedRadixCache, "__init__", stores_marked)
    _replace(Req, "_check_str_based_finish", lambda check: earliest_stop(check, FINISH_MATCHED_STR))
    if is_on_one_host:
        serve_stores_locally()


def _replace(owner: Any, name: str, changed: Callable[[Any], Any]) -> None:
    original = getattr(owner, name)
    if not getattr(original, _MARK, False):
        made = functools.wraps(original)(changed(original))
        setattr(made, _MARK, True)
        setattr(owner, name, made)


# --- prompts for the pool, and requests that only fetch


def prompts_kept(create_sender: Callable[..., bool]) -> Callable[..., bool]:
    """Every request of SGLang's prefill mode goes through `create_sender`. Those that it sends to nobody are
    its own warm-ups, which have a host that nobody has (`FAKE_BOOTSTRAP_HOST`), and it keeps none of their
    pages. Requests in POOL_ROOM are like them, and their pages are kept.
    """

    def create(queue: Any, req: Any, num_kv_heads: int) -> bool:
        if req.bootstrap_room is not None and req.bootstrap_room >= POOL_ROOM:
            req.skip_radix_cache_insert = False
        return create_sender(queue, req, num_kv_heads)

    return create


def pulls_ended(process_events: Callable[..., None]) -> Callable[..., None]:
    """SGLang fetches pages from storage only for requests that wait to be scheduled. So a request whose id
    begins with PULL_ID waits like any other while its pages come. Every step begins with `process_events`,
    before it looks at the queue. What becomes of a pull then depends on `--hicache-host-memory-mode`:

    | mode | where its pages are then | the pull |
    |---|---|---|
    | cache | in the tree of host pages, where the real request finds them | is taken out of the queue |
    | buffer_only | in host memory that the pull alone owns, and that is freed with it | is let through |

    A pull that is let through has SGLang copy its pages to the device, into the tree where the real request
    finds them. It computes what no page holds: less than a page of prompt, and one token. A pull of which a
    page is missing is taken out of the queue in either mode: whole pages are never computed for one, not even
    where nothing was found or host memory is short. Meanwhile SGLang's counts of waiting requests and tokens
    include it, and in the end its count of aborted requests or of answered ones.

    All ranks of a worker decide alike, since SGLang ends a fetch on all of them in the same step. Ranks of a
    pipeline do not in buffer_only, which is refused there (`server_args.check_supported`).
    """
    from sglang.srt.managers.io_struct import AbortReq

    def process(scheduler: Any, *args: Any, **kwargs: Any) -> None:
        process_events(scheduler, *args, **kwargs)
        for pull in [request for request in scheduler.waiting_queue if request.rid.startswith(PULL_ID)]:
            cache = scheduler.tree_cache
            if not cache.has_ongoing_prefetch(pull.cache_request_handle) and not _has_all(cache, pull):
                scheduler.abort_request(AbortReq(rid=pull.rid))

    return process


def _has_all(cache: Any, pull: Any) -> bool:
    """In buffer_only: all its pages were fetched and wait for it alone. Its last token is never looked up."""
    span = cache.waiting_storage_span(pull.cache_request_handle)
    pages = (len(pull.origin_input_ids) - 1) // cache.page_size
    return span is not None and bool(span[1] >= pages * cache.page_size)


# --- salts of embeddings


def salted(lora_name: str | None, salt: str | None) -> str | None:
    """The name of a request's adapter with the request's salt. Clients choose the name: one that would say
    a salt itself is dropped.

    Caches of tenants that embed are kept apart by it. SGLang keeps the pages of what it embeds as of any
    prompt, where the model reads from left to right, and its requests for embeddings have no salt, on the way
    from the HTTP server to the scheduler neither. So the salt travels with the name of the adapter, which the
    scheduler only notes for its KV events.
    """
    if lora_name is not None and lora_name.startswith(_SALT):
        lora_name = None
    return lora_name if salt is None else _SALT + json.dumps([salt, lora_name])


def salts_taken(record: Callable[..., None]) -> Callable[..., None]:
    """`record` has each request right after it was made."""

    def recorded(scheduler: Any, req: Any, lora_name: str | None) -> None:
        if lora_name is not None and lora_name.startswith(_SALT):
            req.cache_salt, lora_name = json.loads(lora_name.removeprefix(_SALT))
        record(scheduler, req, lora_name)

    return recorded


# --- stop strings


def earliest_stop(check: Callable[..., Any], matched_string: Callable[[str], Any]) -> Callable[..., Any]:
    """The stop string that an answer is cut at, where one step of the model completes several. OpenAI's API
    ends the text before the first stop string in it; SGLang takes the one that comes first in the request's
    list: with ["of France", "capital of F"] an answer "The capital of France" kept "The capital ", in which
    the second one begins. Here it is the one that fewest tokens complete; of those that the same token
    completes the one that begins first. `matched_string` makes the reason of such an end.
    """

    def checked(req: Any, new_accepted_len: int = 1) -> Any:
        is_finished = check(req, new_accepted_len)
        stops = req.sampling_params.stop_strs
        found = getattr(req.finished_reason, "matched", None)
        if is_finished and len(stops) > 1 and found in stops:
            tail = req.tail_str(new_accepted_len)
            ends = {
                stop: req._locate_str_stop_finished_len(new_accepted_len, stop_str=stop)
                for stop in stops
                if stop in tail
            }
            if ends and (stop := min(ends, key=lambda one: (ends[one], tail.find(one)))) != found:
                req.finished_reason, req.finished_len = matched_string(stop), ends[stop]
        return is_finished

    return checked


# --- torch's store


def serve_stores_locally() -> None:
    """Torch's key-value stores of this process listen on loopback only; again is a no-op. Imports torch.

    Rank 0 of a process group serves a `TCPStore`, through which the ranks find each other. Torch binds it to
    all interfaces whatever its address, and asks nobody who he is. Gloo and NCCL, whose sockets follow the
    interface, are told to use loopback by `device.ONE_HOST_ENV`. Ranks on several hosts need
    `engine.trusted_network`.
    """
    distributed = importlib.import_module("torch.distributed")
    rendezvous = importlib.import_module("torch.distributed.rendezvous")
    if not getattr(distributed.TCPStore, _MARK, False):
        local = _local_store(distributed.TCPStore)
        for module in (distributed, rendezvous):
            setattr(module, "TCPStore", local)  # noqa: B010  a class is replaced, which types do not allow


def _local_store(store: type[Any]) -> type[Any]:
    """A `TCPStore` that is served at loopback, whatever address it is given."""

    class LocalStore(store):  # type: ignore[misc]
        def __init__(
            self,
            host_name: str,
            port: int,
            world_size: int | None = None,
            is_master: bool = False,
            **more: Any,
        ) -> None:
            if is_master:
                more["master_listen_fd"] = _listen(port)
            super().__init__(LOOPBACK, port, world_size, is_master, **more)

    setattr(LocalStore, _MARK, True)
    made: type[Any] = LocalStore
    return made


def _listen(port: int) -> int | None:
    """A listening socket's descriptor. None: the port is taken, by a store of this process that the new one
    shares, or by another program, which torch then reports.
    """
    try:
        return socket.create_server((LOOPBACK, port), backlog=BACKLOG).detach()
    except OSError:
        return None


def lookups_marked(place: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """`place`: of `prefix_keys` among the arguments of the method that is replaced."""

    def change(look_up: Callable[..., Any]) -> Callable[..., Any]:
        def by_tenant(cache: Any, *args: Any, cache_salt: str | None = None, **more: Any) -> Any:
            given = list(args)
            given[place] = marked(given[place], tenant_of(cache_salt))
            return look_up(cache, *given, cache_salt=cache_salt, **more)

        return by_tenant

    return change


def stores_marked(init: Callable[..., None]) -> Callable[..., None]:
    """`init` makes the cache with its tree, of which SGLang has several."""

    def made(cache: Any, *args: Any, **more: Any) -> None:
        init(cache, *args, **more)
        tree = cache.tree_core
        spec_of, snapshot_of = tree.build_storage_backup_spec, tree.snapshot_buffer_backup

        def spec(node_id: Any, pass_prefix_keys: bool) -> Any:
            found = spec_of(node_id, pass_prefix_keys)
            if found is None:
                return None
            _, salt = tree.prefetch_anchor_info(node_id)
            return found._replace(prefix_keys=marked(found.prefix_keys, tenant_of(salt)))

        def snapshot(node_id: Any, pass_prefix_keys: bool) -> Any:
            found = snapshot_of(node_id, pass_prefix_keys)
            if found is None:
                return None
            keys = marked(found.prefix_keys, tenant_of(found.key.cache_salt))
            return msgspec.structs.replace(found, prefix_keys=keys)

        tree.build_storage_backup_spec, tree.snapshot_buffer_backup = spec, snapshot

    return made
