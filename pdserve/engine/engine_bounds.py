"""What a request may ask of SGLang's scheduler, beyond what SGLang checks itself. Pure.

SGLang's scheduler (0.5.23) computes the requests of all clients together. What fails there ends it, and the
worker with it; the router then tries the next worker, which ends too. So a request that would fail there is
refused before. What has no effect is taken out, or brought down to what has the same effect.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

LARGEST: Final = 1 << 30
"""SGLang's own number for "all tokens"; the scheduler keeps such numbers in 32 bits."""
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
STOP_WINDOW: Final = 128
"""A stop_regex is searched in so many of the last tokens."""
MAX_WAYS: Final = 512
"""In which all stop_regex of a request can match at one place: a search may try them all, at each step."""
_PARSER: Any = re._parser  # type: ignore[attr-defined]
_ONE: Final = frozenset(
    getattr(_PARSER, name) for name in ("LITERAL", "NOT_LITERAL", "IN", "ANY", "RANGE", "CATEGORY")
)
_REPEATS: Final = frozenset(
    getattr(_PARSER, name) for name in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT")
)


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
    if sampling.stop_regex_strs:
        sampling.stop_regex_max_len = min(sampling.stop_regex_max_len, STOP_WINDOW)
    if sampling.stop_token_ids:  # others are never sampled
        sampling.stop_token_ids = {one for one in sampling.stop_token_ids if 0 <= one < vocabulary} or None


def check_stop_regex(patterns: str | Sequence[str] | None) -> None:
    """Raises ValueError for a pattern that is malformed, or whose search could take longer than anybody
    waits: the scheduler does it between two steps, with `re`.
    """
    ways = 0.0
    for pattern in [patterns] if isinstance(patterns, str) else patterns or ():
        try:
            ways += _ways(_PARSER.parse(pattern))
        except (re.error, TypeError, RecursionError, OverflowError) as error:
            raise ValueError(f"stop_regex is malformed: {error}") from None
    if ways > MAX_WAYS:
        raise ValueError(
            "stop_regex can match in too many ways to be searched at each step: repeat single characters "
            "only, with bounds where there are several repeats, and offer fewer alternatives"
        )


def _ways(parsed: Any) -> float:
    """In how many ways a pattern can match at one place, at most."""
    ways = 1.0
    for kind, value in parsed:
        if kind in _REPEATS:
            least, most, inner = value
            most = min(most, max(least, STOP_WINDOW))
            # beyond some hundred ways it is too many anyway, and powers of them have no end
            each = min(_ways(inner), MAX_WAYS + 1.0) ** min(most, 64)
            ways *= (most - least + 1) * each
        elif kind is _PARSER.SUBPATTERN:
            ways *= _ways(value[3])
        elif kind is _PARSER.BRANCH:
            ways *= sum(map(_ways, value[1]))
        elif kind not in _ONE and kind is not _PARSER.AT:
            return math.inf  # looking around, groups named again: rare, and hard to bound
        ways = min(ways, MAX_WAYS + 1.0)
    return ways
