"""Fields that reach SGLang's sampler, whatever endpoint they came by: OpenAI's ranges, wider where SGLang's
users need it and the sampler stays finite.

SGLang's scheduler (0.5.23) computes all requests together: one logit of infinity with `top_p` makes
probabilities of NaN, an exception of the sampler, and the end of the scheduler for everybody.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

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
