"""Whether another worker can continue a lost stream: where the tokens so far determine the rest. Pure."""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec

from pdserve.router.api.endpoints import Endpoint
from pdserve.router.api.request_body import UNREADABLE

Continue = Literal["deterministic", "always", "never"]

_LOOKS_BACK: Final = (
    *("regex", "ebnf", "json_schema", "structural_tag", "tools", "functions"),
    *("top_logprobs", "return_logprob", "return_hidden_states"),
    *(
        "stop",
        "stop_sequences",
        "stop_regex",
        "custom_logit_processor",
        "custom_params",
        "watermark",
        "session_params",
    ),
    *("image_data", "video_data", "audio_data", "return_sampling_mask", "return_routed_experts"),
    *("min_tokens", "min_new_tokens", "beam_width", "thinking_budget", "suffix", "echo"),
    "output_config",
)
"""Parameters that make the rest depend on more than the tokens so far, unless they are empty."""
_NEUTRAL: Final = {
    "n": 1,
    "best_of": 1,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "repetition_penalty": 1,
}
"""Parameters of the same kind that are harmless at this value."""


def may_resume(endpoint: Endpoint, body: bytes, which: Continue, *, seeds_count: bool) -> bool:
    """Whether another worker, given the tokens so far, continues as the first one would have done.
    `seeds_count`: the request's seed determines what both of them sample.

    `deterministic`: sampling is greedy, or seeded where seeds count. `always`: sampled streams too; the rest
    is then another draw from the same distribution.
    """
    if which == "never" or not endpoint.is_resumable:
        return False
    try:
        asked: dict[str, Any] = msgspec.json.decode(body, type=dict[str, Any])
    except UNREADABLE:
        return False
    sampling = asked.get(endpoint.sampling_field) if endpoint.sampling_field else asked
    if not isinstance(sampling, dict) or _looks_back(asked) or _looks_back(sampling):
        return False
    if which == "always" or sampling.get("temperature") == 0 or sampling.get("top_k") == 1:
        return True
    return seeds_count and sampling.get("seed", sampling.get("sampling_seed")) is not None


def _looks_back(asked: dict[str, Any]) -> bool:
    """Some parameter makes the rest depend on more than the tokens so far."""
    formatted, logprobs = asked.get("response_format") or {}, asked.get("logprobs")
    is_text = isinstance(formatted, dict) and formatted.get("type", "text") == "text"
    is_batch = isinstance(asked.get("text"), list)
    return (
        not is_text
        or is_batch
        or any(asked.get(name) for name in _LOOKS_BACK)
        or any(asked.get(name) not in (None, value) for name, value in _NEUTRAL.items())
        or (logprobs is not None and logprobs is not False)  # 0 asks for the chosen token's
    )
