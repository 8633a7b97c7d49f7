"""Tokens of `/v1/messages` as Anthropic's API counts them.

    input_tokens + cache_read_input_tokens + cache_creation_input_tokens = the prompt

SGLang (0.5.23) tells what was read of caches, and never what was stored there. A client that marks its prompt
(`cache_control`) pays for three kinds of tokens. So of such a request the whole pages that were computed are
told as created: the next one finds them.
"""

from __future__ import annotations

from typing import Any

from pdserve.engine.http.request import current_request


def install(page_tokens: int) -> None:
    """Have SGLang's front of Anthropic's API count so. Can be called again. Imports SGLang."""
    from sglang.srt.entrypoints.anthropic import serving

    usage_of = getattr(serving._anthropic_usage_from_openai, "plain", serving._anthropic_usage_from_openai)

    def usage_with_created(usage: Any, **parts: Any) -> Any:
        made = usage_of(usage, **parts)
        prompt, http = getattr(usage, "prompt_tokens", 0) or 0, current_request()
        if made.input_tokens is not None and prompt:
            is_marked = http is not None and http.marks_cache
            read = min(made.cache_read_input_tokens or 0, prompt)
            created = max(0, prompt // page_tokens * page_tokens - read) if is_marked else 0
            made.input_tokens = prompt - read - created
            if read or is_marked:
                made.cache_read_input_tokens = read
            if is_marked:
                made.cache_creation_input_tokens = created
        return made

    usage_with_created.plain = usage_of  # type: ignore[attr-defined]
    serving._anthropic_usage_from_openai = usage_with_created
