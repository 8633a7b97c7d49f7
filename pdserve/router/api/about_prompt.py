"""Requests whose answers say more of a prompt than a worker knows that got the prompt's KV from another one.

After a direct hand-off, SGLang's decode worker has the KV and the first token, and no more. Log-probabilities
of prompt tokens, hidden states and the like stayed at the prefill worker. Prompts with media, and sessions
that SGLang itself keeps, are left to workers that compute prompts as well: they were not tried.
"""

from __future__ import annotations

import re

import msgspec

from pdserve.router.api.request_body import UNREADABLE

_EMPTY = msgspec.Raw(b"")
_MEDIA = re.compile(rb'"(?:(?:image|video|audio)_url|input_audio|image|video|audio|source)"\s*:')
"""A member of a message's part. In a text its quotes would be written with a backslash."""
_OFF = frozenset((b"", b"null", b"false", b"-1", b"[]"))


class _AboutPrompt(msgspec.Struct, gc=False):
    """The fields of SGLang 0.5.23 that ask for it. They are off with a value of `_OFF`."""

    messages: msgspec.Raw = _EMPTY
    echo: msgspec.Raw = _EMPTY
    logprob_start_len: msgspec.Raw = _EMPTY
    return_hidden_states: msgspec.Raw = _EMPTY
    return_routed_experts: msgspec.Raw = _EMPTY
    return_indexer_topk: msgspec.Raw = _EMPTY
    return_sampling_mask: msgspec.Raw = _EMPTY
    return_entropy: msgspec.Raw = _EMPTY
    session_id: msgspec.Raw = _EMPTY
    session_params: msgspec.Raw = _EMPTY
    input_embeds: msgspec.Raw = _EMPTY
    positional_embed_overrides: msgspec.Raw = _EMPTY
    image_data: msgspec.Raw = _EMPTY
    video_data: msgspec.Raw = _EMPTY
    audio_data: msgspec.Raw = _EMPTY


_decoder = msgspec.json.Decoder(_AboutPrompt)
_FIELDS = _AboutPrompt.__struct_fields__[1:]


def asks_about_prompt(body: bytes) -> bool:
    """Whether the request needs a worker that computes its prompt."""
    try:
        view = _decoder.decode(body)
    except UNREADABLE:
        return True
    if any(bytes(getattr(view, name)) not in _OFF for name in _FIELDS):
        return True
    return _MEDIA.search(view.messages) is not None
