"""The body that has a worker without `/pd/prefill` compute a prompt: the client's, for an answer of one
token. Pure.

Members are appended, and of a name that comes twice the last one counts (see `with_members`). So templates,
tools and media make the same prompt as in the client's request.
"""

from __future__ import annotations

from typing import Any, Final

from pdserve.router.api.endpoints import Endpoint
from pdserve.router.api.request_body import with_members

_OF_OPENAI: Final[dict[str, Any]] = {
    "stream": False,
    "stream_options": None,
    "n": 1,
    "max_tokens": 1,
    "max_completion_tokens": 1,
    "min_tokens": 0,
}
_BY_PATH: Final[dict[str, dict[str, Any]]] = {
    "/v1/chat/completions": _OF_OPENAI,
    "/v1/completions": {name: value for name, value in _OF_OPENAI.items() if name != "max_completion_tokens"},
    "/v1/messages": {"stream": False, "max_tokens": 1},
    "/generate": {"stream": False},
}
"""For each endpoint with a prefill stage. SGLang's own has its parameters in a member of their own; no other
engine has it.
"""


def one_token_body(endpoint: Endpoint, body: bytes) -> bytes:
    """`body`: a JSON object."""
    return with_members(body, _BY_PATH[endpoint.path])
