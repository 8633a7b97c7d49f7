"""Anthropic's cache diagnostics in a request: `{"diagnostics": {"previous_message_id": ID | null}}`. Pure."""

from __future__ import annotations

from typing import Final

import msgspec

from pdserve.router.api.request_body import UNREADABLE


class _Diagnostics(msgspec.Struct, gc=False):
    previous_message_id: str | None = None


_decoder: Final = msgspec.json.Decoder(_Diagnostics | None)


def asks_diagnosis(json: msgspec.Raw) -> bool:
    """The client names an answer of which this request goes on. Without one it begins."""
    try:
        asked = _decoder.decode(json)
    except UNREADABLE:
        return False
    return asked is not None and asked.previous_message_id is not None
