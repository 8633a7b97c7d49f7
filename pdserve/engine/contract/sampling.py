"""Fields that reach SGLang's sampler, whatever endpoint they came by: OpenAI's ranges, wider where SGLang's
users need it and the sampler stays finite.

SGLang's scheduler (0.5.23) computes all requests together: one logit of infinity with `top_p` makes
probabilities of NaN, an exception of the sampler, and the end of the scheduler for everybody.

What a request may ask of the scheduler, beyond what SGLang checks itself: what fails there ends it, and the
worker with it; the router then tries the next worker, which ends too. So a request that would fail there is
refused before. What has no effect is taken out, or brought down to what has the same effect.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from pdserve.engine.contract.grammars import ebnf, json_schema, regex, structural_tag
from pdserve.engine.contract.values import (
    DROP,
    Rule,
    anything,
    boolean,
    integer,
    kind,
    list_of,
    number,
    refused,
    text,
)

LARGEST: Final = 1 << 30
"""SGLang's own number for "all tokens"; the scheduler keeps such numbers in 32 bits."""
MAX_BIASES: Final = 1024
"""The scheduler sets them one by one, for each request that joins the batch."""
MAX_STOPS: Final = 64
MAX_STOP_CHARACTERS: Final = 1024
MAX_STOP_TOKENS: Final = 1024
MAX_CHOICES: Final = 128


def logit_bias(name: str, value: Any) -> Any:
    """By token id, as a string; numbers from -100 to 100, as at OpenAI."""
    if not isinstance(value, dict):
        raise refused(name, f"must be an object of token ids, not {kind(value)}")
    if len(value) > MAX_BIASES:
        raise refused(name, f"has {len(value):,} tokens; at most {MAX_BIASES:,} are allowed")
    bias = number(-100, 100)
    for token, one in value.items():
        if not (token.isascii() and token.isdigit() and len(token) <= 10):
            raise refused(name, "must have token ids as its names")
        bias(f"{name}.{token}", one)
    return value or DROP


def stop(name: str, value: Any) -> Any:
    """A string or a list of them. An empty one would be found in every text: it is as none."""
    one = text(MAX_STOP_CHARACTERS)
    if isinstance(value, str):
        return one(name, value) or DROP
    found = list_of(lambda member, given: one(member, given) or DROP, MAX_STOPS)(name, value)
    if not found:
        return DROP
    return value if len(found) == len(value) else found


def stop_regex(name: str, value: Any) -> Any:
    """SGLang's scheduler would search by it between two steps of all requests."""
    if value:
        raise refused(name, "is not supported: use stop")
    return DROP


def top_p(name: str, value: Any) -> Any:
    """0 leaves the likeliest token, as a share that SGLang accepts."""
    return number(0, 1)(name, value) or 1e-9


def top_k(name: str, value: Any) -> Any:
    """-1 and 0: all tokens."""
    return integer(-1, LARGEST)(name, value) or -1


_TOKENS: Final = integer(0, LARGEST)
_SEED: Final = integer(-(1 << 63), (1 << 63) - 1)
COMMON: Final[Mapping[str, Rule]] = {
    "temperature": number(0, 100),
    "top_p": top_p,
    "top_k": top_k,
    "min_p": number(0, 1),
    "frequency_penalty": number(-2, 2),
    "presence_penalty": number(-2, 2),
    "repetition_penalty": number(0.01, 2),
    "logit_bias": logit_bias,
    "stop": stop,
    "stop_token_ids": list_of(integer(-(1 << 63), (1 << 63) - 1), MAX_STOP_TOKENS),
    "stop_regex": stop_regex,
    "n": integer(1, MAX_CHOICES),
    "ignore_eos": boolean,
    "skip_special_tokens": boolean,
    "spaces_between_special_tokens": boolean,
    "no_stop_trim": boolean,
    "regex": regex,
    "ebnf": ebnf,
    "custom_params": anything(65_536),
}
"""Under the same names in SGLang's `sampling_params` and in the bodies of OpenAI's endpoints."""

OPENAI: Final[Mapping[str, Rule]] = {
    **COMMON,
    "seed": _SEED,
    "min_tokens": _TOKENS,
    "best_of": integer(1, MAX_CHOICES),
}
SAMPLING_PARAMS: Final[Mapping[str, Rule]] = {
    **COMMON,
    "sampling_seed": _SEED,
    "max_new_tokens": _TOKENS,
    "min_new_tokens": _TOKENS,
    "beam_width": integer(1, MAX_CHOICES),
    "json_schema": json_schema,
    "structural_tag": structural_tag,
}
"""Of `/generate`."""

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
