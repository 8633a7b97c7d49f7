"""What SGLang says in the output of its scheduler and in the `meta_info` of an answer."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from pdserve.engine.http.cache_report import Found, Reuse
from pdserve.engine.http.timing import FirstToken


def found_of(cached_tokens: int, details: Mapping[str, Any] | None) -> Found:
    """From SGLang's count and its `cached_tokens_details`, which may be missing."""
    if not details:
        return Found(device=cached_tokens)
    return Found(*(details.get(tier) or 0 for tier in ("device", "host", "storage")))


def note_counts(output: Any, reuse_of: Callable[[str, int, Any], Reuse | None]) -> None:
    """Record what each request of a batch of the scheduler's output found cached. The batch stays as it is:
    SGLang's own metrics and traces count from it. `reuse_of`: by SGLang's request id, the tokens of its
    answer and the reason of its end; None where nothing is known yet.
    """
    counts, details = getattr(output, "cached_tokens", None), getattr(output, "cached_tokens_details", None)
    if not counts:
        return
    tokens, ends = getattr(output, "completion_tokens", None), getattr(output, "finished_reasons", None)
    for i, rid in enumerate(output.rids):
        reuse = reuse_of(rid, tokens[i] if tokens else 0, ends[i] if ends else None)
        if reuse is not None:
            reuse.note(rid, found_of(counts[i], details[i] if details else None), output.prompt_tokens[i])


def tell_counts(answers: Sequence[Any], reuse: Reuse) -> None:
    """Replace the counts of cached tokens in what SGLang yields to one HTTP request by what its client is
    told. To do it twice changes nothing.
    """
    for answer in answers:
        meta = answer.get("meta_info") or {}
        told = reuse.told(meta.get("id", "")) if "cached_tokens" in meta else None
        if told is None:
            continue
        meta["cached_tokens"] = sum(told)
        if "cached_tokens_details" in meta:
            meta["cached_tokens_details"] = _details(told, meta["cached_tokens_details"] or {})


def _details(told: Found, given: dict[str, Any]) -> dict[str, Any]:
    said = {**given, "device": told.device, "host": told.host}
    if told.pool or "storage" in given:
        said["storage"] = told.pool
    return said


def clipped(details: dict[str, Any], tokens: int) -> dict[str, Any]:
    """`cached_tokens_details` of a prompt's first tokens. In a prompt the tokens on the device come first,
    then those on the host.
    """
    said, left = dict(details), tokens
    for place in ("device", "host", "storage"):
        if place in said:
            said[place] = min(said[place] or 0, left)
            left -= said[place]
    return said


def first_token(answers: Sequence[Mapping[str, Any]]) -> FirstToken:
    """Where the time to the first token went. What SGLang does not say is 0, or not there.

    SGLang 0.5.23 says it with `--enable-metrics`, which every worker has: `queue_time` (its waiting queue,
    `storage_prefetch_wait` within it), `forward_entry_time` and `prefill_finished_time`.
    """
    meta = (answers[0].get("meta_info") or {}) if answers else {}
    pull_s = max(0.0, meta.get("storage_prefetch_wait") or 0.0)
    parts_s = {"queue": max(0.0, (meta.get("queue_time") or 0.0) - pull_s), "pull": pull_s}
    if "prefill_finished_time" in meta and "forward_entry_time" in meta:
        parts_s["compute"] = max(0.0, meta["prefill_finished_time"] - meta["forward_entry_time"])
    return FirstToken(parts_s)


def is_aborted(answer: Mapping[str, Any]) -> bool:
    """SGLang ended this request before its time."""
    return ((answer.get("meta_info") or {}).get("finish_reason") or {}).get("type") == "abort"


async def under_one_id(contents: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
    """The steps of a stream of several choices or prompts, each of which is a request of its own to SGLang,
    under the id of the first: OpenAI's API gives all chunks of a stream one id.
    """
    first = ""
    async with aclosing(contents):
        async for content in contents:
            meta = content.get("meta_info") or {}
            first = first or meta.get("id", "")
            if meta.get("id", first) != first:
                content = {**content, "meta_info": {**meta, "id": first}}
            yield content
