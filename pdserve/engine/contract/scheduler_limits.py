"""What a request may ask of SGLang's scheduler, beyond what SGLang checks itself. Pure.

SGLang's scheduler (0.5.23) computes the requests of all clients together. What fails there ends it, and the
worker with it; the router then tries the next worker, which ends too. So a request that would fail there is
refused before. What has no effect is taken out, or brought down to what has the same effect.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from pdserve.engine.contract.sampling import LARGEST

MAX_LOGPROBS: Final = 10_000_000
"""Of a request: each is two Python objects, and the scheduler stands still while it makes a prompt's."""
GRAMMARS: Final = ("json_schema", "regex", "ebnf", "structural_tag")
TEXTS: Final = {
    "lora_name": "lora_path",
    "extra_key": "extra_key",
    "cache_salt": "cache_salt",
    "custom_logit_processor": "custom_logit_processor",
}
"""Fields of a request at the scheduler, by the names that clients give them."""


def check_ids(ids: Sequence[int], vocabulary: int) -> None:
    """Raises ValueError for a token that the model does not have."""
    try:
        each = np.asarray(ids, np.int64)
        are_known = not each.size or (each.min() >= 0 and each.max() < vocabulary)
    except OverflowError:
        are_known = False
    if not are_known:
        raise ValueError(f"A token of the prompt is outside the model's vocabulary: [0, {vocabulary}).")


def check_logprobs(prompt: int, output: int, each: int, vocabulary: int) -> None:
    """`prompt`, `output`: tokens that get log-probabilities, `each` so many. Raises ValueError."""
    if each > vocabulary:
        raise ValueError(f"{each} log-probabilities of a token are more than the vocabulary of {vocabulary}.")
    if each * (prompt + output) > MAX_LOGPROBS:
        raise ValueError(
            f"{each} log-probabilities for each of {prompt + output} tokens are more than {MAX_LOGPROBS:,}: "
            "ask for fewer, or leave the prompt's out"
        )


def check_texts(tokenized: Any) -> None:
    """`tokenized`: one request as the scheduler gets it. Raises ValueError where a field that SGLang takes
    as a list, one for each prompt, is still a list: the scheduler would trip over it.
    """
    for name, asked in TEXTS.items():
        value = getattr(tokenized, name, None)
        if value is not None and not isinstance(value, str):
            raise ValueError(f"{asked} must be a string where there is one prompt.")


def bound_sampling(sampling: Any, vocabulary: int) -> None:
    """`sampling`: SGLang's SamplingParams. Raises ValueError.

    A grammar that is over allows the end alone, which a minimum of tokens forbids: then no token is left, the
    probabilities are no numbers, and the scheduler ends. Tools that must be called are a grammar too.
    """
    if sampling.min_new_tokens and any(getattr(sampling, name, None) for name in GRAMMARS):
        raise ValueError(
            "min_tokens cannot be combined with a schema, a grammar, or tools that must be called."
        )
    sampling.top_k = min(sampling.top_k, LARGEST)
    sampling.min_new_tokens = min(sampling.min_new_tokens, LARGEST)
    if sampling.stop_regex_strs:  # searched between two steps of all requests, by `re`, for any time
        raise ValueError("stop_regex is not supported: use stop.")
    if sampling.stop_token_ids:  # others are never sampled
        sampling.stop_token_ids = {one for one in sampling.stop_token_ids if 0 <= one < vocabulary} or None
