"""Texts that cannot fit a model are refused before a worker tokenizes them. Pure.

Only what a worker would refuse too is refused: text that SGLang (0.5.23) tokenizes whole, each prompt of a
list by itself. A chat is not counted, since its template may drop parts of it: the worker counts it then.
"""

from __future__ import annotations

from typing import Final

import msgspec

from pdserve.errors import RequestError
from pdserve.router.api.endpoints import Endpoint
from pdserve.router.api.request_body import UNREADABLE, RequestView
from pdserve.text_bound import TextBound

_INSTEAD: Final = ("input_ids", "input_embeds", "image_data", "video_data", "audio_data")
"""Beside them SGLang may take no text, or another."""
_texts: Final = msgspec.json.Decoder(str | list[str])


def check_texts(view: RequestView, endpoint: Endpoint, tokens: int, bound: TextBound) -> None:
    """Raises RequestError (400) if a text of the prompt has `tokens` or more in any case: more than the model
    takes.
    """
    for name in endpoint.text_fields:
        said: msgspec.Raw = getattr(view, name)
        if not bound.can_exceed(len(said), tokens) or any(getattr(view, one) for one in _INSTEAD):
            continue
        try:
            texts = _texts.decode(said)
        except UNREADABLE:
            continue  # token ids, or what the worker refuses
        for text in [texts] if isinstance(texts, str) else texts:
            fewest = bound.fewest_tokens(text)
            if fewest >= tokens:
                size_bytes = len(text.encode("utf-8", "replace"))
                message = (
                    f"The text in '{name}' is too long: {size_bytes:,} bytes are at least {fewest:,} tokens, "
                    f"and the model takes fewer than {tokens:,}. Send a shorter text."
                )
                raise RequestError(400, message, param=name, code="context_length_exceeded")
