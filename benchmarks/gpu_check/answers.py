"""Whether two workers give the same answer to a prompt. Pure.

A GPU adds numbers in another order when more or less of a prompt is cached. Bfloat16 then differs in its last
bits, and the second likeliest token may win where it was as likely. A wrong page changes everything.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

TIE: Final = 0.1
"""A second token whose log-probability is so close is as likely."""
NOISE: Final = 0.25
"""So far may the log-probability of one token be apart."""


class Answer(msgspec.Struct, frozen=True):
    """A greedy answer: its tokens, the log-probability of each, the second likeliest token of each place with
    its own, and how many tokens of the prompt were found in which place.
    """

    tokens: list[int]
    logprobs: list[float]
    seconds: list[tuple[int, float]]
    found: dict[str, int]

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> Answer:
        """From the body of SGLang's /generate with return_logprob and top_logprobs_num = 2."""
        meta = body["meta_info"]
        pairs = meta["output_token_logprobs"]
        seconds = [(top[1][1], top[1][0]) for top in meta["output_top_logprobs"]]
        places = meta.get("cached_tokens_details") or {}
        found = {name: count for name, count in places.items() if isinstance(count, int)}
        return cls([pair[1] for pair in pairs], [pair[0] for pair in pairs], seconds, found)


def difference(wanted: Answer, found: Answer) -> str:
    """What is not as wanted; empty: all is, up to the first tie that went the other way."""
    if len(wanted.tokens) != len(found.tokens):
        return f"{len(found.tokens)} tokens, not {len(wanted.tokens)}"
    for place, (token, other) in enumerate(zip(wanted.tokens, found.tokens, strict=True)):
        logprob = wanted.logprobs[place]
        if token != other:
            second, its = wanted.seconds[place]
            return (
                "" if other == second and logprob - its <= TIE else f"token {place} is {other}, not {token}"
            )
        if (apart := abs(logprob - found.logprobs[place])) > NOISE:
            return f"the log-probability of token {place} is {apart:.3f} away"
    return ""
