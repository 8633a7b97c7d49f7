"""SGLang's paths that generate from a prompt, as far as prefill, pull and continuation go."""

from __future__ import annotations

from typing import Final

from pdserve.errors import RequestError

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
GENERATE: Final = "/generate"
ENDPOINTS: Final = (CHAT, COMPLETIONS, GENERATE)


def check_endpoint(endpoint: str) -> None:
    """Raises RequestError (404) for any other path."""
    if endpoint not in ENDPOINTS:
        known = ", ".join(ENDPOINTS)
        raise RequestError(404, f"endpoint must be one of {known}, not {endpoint[:200]!r}")
