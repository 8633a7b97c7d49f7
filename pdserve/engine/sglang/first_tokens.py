"""The first token of an answer, from the prefill worker that has sampled it to the decode worker.

A prefill worker samples a token behind the prompt, as the client asks. It reports it with a digest of all
that the token follows from, and the router sends both to the decode worker:

    x-pdserve-first: 4021x9f0c6d1f3c1b4d0c8e5a7b2d6f1e3a90

The decode worker makes the digest itself. Where it is the same, the answer begins with that token: it need
not wait for the last page to be computed, and the pass that does so gives the second token
(`children/first_tokens.py`). In any other case the token is as if it had not come. So is it where more than
prompt and parameters decides an answer. Whether a token is taken never depends on which one it is: a sampled
answer's distribution stays the same.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from typing import Any, Final

from pdserve.engine.sglang.children.first_tokens import FIRST

_DRAWN: Final = ("temperature", "top_p", "top_k", "min_p", "sampling_seed", "logit_bias")
"""SGLang's SamplingParams that decide which token is sampled, in any answer."""
_SHAPING: Final = (
    *("frequency_penalty", "presence_penalty", "min_new_tokens", "watermark"),
    *("json_schema", "regex", "ebnf", "structural_tag", "beam_width"),
)
"""Those that make a token depend on more, or an answer of more than its tokens, unless they are empty."""
_BESIDE: Final = (
    *("mm_inputs", "input_embeds", "positional_embed_overrides", "lora_id", "custom_logit_processor"),
    *("return_logprob", "return_hidden_states", "return_routed_experts", "return_indexer_topk"),
    *("return_sampling_mask", "return_entropy", "session_id", "session_params", "bootstrap_room"),
)
"""The same of a request."""
_SGLANGS_OWN: Final = "__sglang_"
MAX_DIGITS: Final = 9


def digest_of(tokenized: Any, namespace: str) -> str:
    """What the first token of an answer follows from, in 32 hexadecimal digits. `tokenized`: a request as it
    goes to the scheduler (`TokenizedGenerateReqInput`), with a prompt of token ids. `namespace`: of the
    worker's pages, which names the model and its revision.
    """
    drawn = [getattr(tokenized.sampling_params, name) for name in _DRAWN]
    said = repr((namespace, *drawn)).encode()
    return hashlib.blake2b(
        said + b"\0" + array("q", tokenized.input_ids).tobytes(), digest_size=16
    ).hexdigest()


def take(handed: bytes, tokenized: Any, namespace: str, vocabulary: int) -> bool:
    """Have the scheduler begin the answer with the token, if that is the answer's. `handed`: a value of
    `x-pdserve-first`. Returns whether it does; where not, the request is as it was.
    """
    token, _, digest = handed.partition(b"x")
    if not token.isdigit() or len(token) > MAX_DIGITS or int(token) >= vocabulary:
        return False
    if tokenized.input_ids is None or not _follows_from_prompt(tokenized):
        return False
    if digest.decode("latin-1") != digest_of(tokenized, namespace):
        return False
    sampling = tokenized.sampling_params
    sampling.custom_params = {**(sampling.custom_params or {}), FIRST: int(token)}
    return True


def _follows_from_prompt(tokenized: Any) -> bool:
    sampling = tokenized.sampling_params
    others = [name for name in sampling.custom_params or () if not name.startswith(_SGLANGS_OWN)]
    return (
        not any(getattr(tokenized, name, None) for name in _BESIDE)
        and not any(getattr(sampling, name) for name in _SHAPING)
        and not others
        and sampling.repetition_penalty == 1.0
        and sampling.n == 1
        and (sampling.max_new_tokens is None or sampling.max_new_tokens > 1)
    )


def sampled(output_ids: Sequence[int] | None, finish: Any) -> int | None:
    """The token that a prefill has sampled. `finish`: SGLang's reason for its end. None: it was none of the
    model's, and SGLang has put another one in its place.
    """
    if not output_ids or isinstance((finish or {}).get("matched"), str):
        return None
    return int(output_ids[-1])
