"""Caches of tenants that embed are kept apart: a scheduler's requests for embeddings get a `cache_salt`.

SGLang (0.5.23) keeps the pages of what it embeds as of any prompt, where the model reads from left to right.
Its requests for embeddings have no salt, on the way from the HTTP server to the scheduler neither. So the
salt travels with the name of the request's adapter, which the scheduler only notes for its KV events.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any, Final

_MARK: Final = "__pdserve_embedding_salts__"
_START: Final = "\0pdserve-salt:"  # no name of an adapter begins so; see `salted`


def salted(lora_name: str | None, salt: str | None) -> str | None:
    """The name of a request's adapter with the request's salt. Clients choose the name: one that would say
    a salt itself is dropped.
    """
    if lora_name is not None and lora_name.startswith(_START):
        lora_name = None
    return lora_name if salt is None else _START + json.dumps([salt, lora_name])


def install() -> None:
    """Make the scheduler of this process take the salts; again is a no-op. Imports SGLang's scheduler."""
    from sglang.srt.managers.scheduler import Scheduler

    original = Scheduler._record_kv_event_lora_name
    if not getattr(original, _MARK, False):
        Scheduler._record_kv_event_lora_name = salting(original)


def salting(record: Callable[..., None]) -> Callable[..., None]:
    """`Scheduler._record_kv_event_lora_name`, which has each request right after it was made."""

    @functools.wraps(record)
    def recorded(scheduler: Any, req: Any, lora_name: str | None) -> None:
        if lora_name is not None and lora_name.startswith(_START):
            req.cache_salt, lora_name = json.loads(lora_name.removeprefix(_START))
        record(scheduler, req, lora_name)

    setattr(recorded, _MARK, True)
    return recorded
