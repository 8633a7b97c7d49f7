"""Conversations that tenants have kept in the pool for a while or brought up, and how much that is. Pure.

The pool keeps pages for whoever writes there; the router bounds what each tenant may ask for. Beyond its
bound a wish is passed over, and the request is served as ever.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

from pdserve.errors import RequestError
from pdserve.kvpool.protocol.messages import MAX_KEEP_S
from pdserve.router.api.errors import TooManyError
from pdserve.router.api.request_body import UNREADABLE, RequestView
from pdserve.router.tenants.tenant import RATE_EXCEEDED, TenantState

RETAIN_HEADER: Final = b"x-pdserve-retain"
"""Of a request: for how many seconds its conversation is to be kept."""
RETAINED_HEADER: Final = b"x-pdserve-retained"
"""Of the answer: for how many it will be."""
MAX_CONVERSATIONS: Final = 1000
"""Of one tenant."""
PREFETCHED_S: Final = 60
"""How long a prompt counts that was brought up."""
USUAL_TTL_S: Final = 300
"""Of a mark without a time, in Anthropic's API."""
CACHE_CONTROL: Final = b'"cache_control"'
_MARK: Final = re.compile(rb'"cache_control"\s*:\s*\{[^{}]{0,256}\}')
"""In a text its quotes would be written with a backslash."""
_TTL: Final = re.compile(rb'"ttl"\s*:\s*"(\d{1,4})([smh])"')
_RETENTION: Final = re.compile(rb'\s*"(\d{1,4})([smh])"\s*')
_UNITS_S: Final = {b"s": 1, b"m": 60, b"h": 3600}
_SECONDS: Final = re.compile(rb"[0-9]{1,9}")


def seconds_of(said: bytes) -> int:
    """What the header asks for; 0: nothing, or no number."""
    return min(int(said), MAX_KEEP_S) if _SECONDS.fullmatch(said) else 0


def seconds_marked(body: bytes, view: RequestView) -> int:
    """For how long the marks in a body want the prompt kept: the longest counts. 0: for no time."""
    seconds = 0
    if CACHE_CONTROL in body:
        for mark in _MARK.finditer(body):
            found = _TTL.search(mark[0])
            seconds = max(seconds, USUAL_TTL_S if found is None else int(found[1]) * _UNITS_S[found[2]])
    if found := _RETENTION.fullmatch(bytes(view.prompt_cache_retention)):
        seconds = max(seconds, int(found[1]) * _UNITS_S[found[2]])
    return min(seconds, MAX_KEEP_S)


class _Payload(msgspec.Struct, frozen=True):
    ttl_s: float = MAX_KEEP_S


class _Action(msgspec.Struct):
    action_type: str
    payload: _Payload = _Payload()


class _Envelope(msgspec.Struct):
    actions: list[_Action] = []


_envelope_decoder: Final = msgspec.json.Decoder(_Envelope)


def _actions(hints: msgspec.Raw) -> list[tuple[str, float]]:
    """(prefetch, demote or retain; for how many seconds) of those that a worker carries out. Raises
    RequestError (400).
    """
    try:
        actions = _envelope_decoder.decode(hints).actions
    except UNREADABLE:
        what = "kv_hints must be an envelope of hints: protocol_version, message_id, actions."
        raise RequestError(400, what, param="kv_hints") from None
    found = []
    for action in actions:
        kind = action.action_type.removeprefix("kv.")
        if kind in ("retain", "pin"):
            found.append(("retain", min(action.payload.ttl_s, MAX_KEEP_S)))
        elif kind in ("prefetch", "demote"):
            found.append((kind, PREFETCHED_S))
    return found


def keep(tenant: TenantState, conversation: str, tokens: int, seconds: float, now_s: float) -> bool:
    """Whether the tenant may have so many tokens of the conversation kept, beside what other processes keep
    for it; if so, they count from now on, in place of what counted for it before.
    """
    if seconds <= 0 or not tenant.limits.retain_tokens:
        return False
    kept = tenant.kept
    for name in [name for name, (_, until_s) in kept.items() if until_s <= now_s or name == conversation]:
        del kept[name]
    used = tenant.kept_tokens(now_s) + tenant.kept_elsewhere
    if used + tokens > tenant.limits.retain_tokens or len(kept) >= MAX_CONVERSATIONS:
        return False
    kept[conversation] = tokens, now_s + seconds
    return True


def check_hints(
    tenant: TenantState, hints: msgspec.Raw, conversation: str, tokens: int, now_s: float
) -> None:
    """Raises RequestError: 400 for what is no envelope of hints, 403 for a hint that the tenant may not
    give, and TooManyError beyond its bound.

    What is brought up counts as kept for `PREFETCHED_S`. Nobody demotes pages that others share.
    """
    if not tenant.limits.retain_tokens:
        raise RequestError(403, "You may give no hints (retain_tokens).", type_="permission_error")
    for kind, seconds in _actions(hints):
        if kind == "demote":
            if tenant.limits.cache:
                message = "You share a cache with others, whose pages you may not demote."
                raise RequestError(403, message, type_="permission_error")
            continue
        name = f"+{conversation}" if kind == "prefetch" else conversation
        if seconds <= 0:
            release(tenant, name)
        elif not keep(tenant, name, tokens, seconds, now_s):
            message = "You may not have more tokens kept or prefetched (retain_tokens)."
            raise TooManyError(message, PREFETCHED_S, RATE_EXCEEDED)


def release(tenant: TenantState, conversation: str) -> None:
    """The conversation is kept no longer."""
    tenant.kept.pop(conversation, None)
