"""The paths of a worker that generate, as far as prefill, pull, tracking and continuation know them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pdserve.engine.contract.endpoints import CHAT as CHAT
from pdserve.engine.contract.endpoints import COMPLETIONS as COMPLETIONS
from pdserve.engine.contract.endpoints import GENERATE as GENERATE
from pdserve.engine.contract.endpoints import MESSAGES as MESSAGES
from pdserve.engine.contract.endpoints import RESPONSES as RESPONSES
from pdserve.errors import RequestError

SCORE: Final = "/v1/score"
RERANK: Final = "/v1/rerank"
EMBEDDINGS: Final = "/v1/embeddings"
PREFILL: Final = "/pd/prefill"
CONTINUE: Final = "/pd/continue"

PROMPT_PATHS: Final = (CHAT, COMPLETIONS, GENERATE, MESSAGES)
"""SGLang's own paths that generate from a prompt."""
PREFILL_PATHS: Final = (*PROMPT_PATHS, RESPONSES)
"""Those whose prompts can be computed alone, by `/pd/prefill` and `/pd/pull`."""
GENERATING_PATHS: Final = frozenset({*PREFILL_PATHS, SCORE, RERANK, PREFILL, CONTINUE})
"""Paths whose requests are tracked."""


def check_endpoint(endpoint: str, paths: Sequence[str] = PROMPT_PATHS) -> None:
    """Raises RequestError (404) unless `endpoint` is one of `paths`."""
    if endpoint not in paths:
        known = ", ".join(paths)
        raise RequestError(404, f"endpoint must be one of {known}, not {endpoint[:200]!r}")
