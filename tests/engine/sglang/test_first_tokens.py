"""Which answers begin with the token of a prefill worker."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams

from pdserve.engine.sglang.children.first_tokens import FIRST
from pdserve.engine.sglang.first_tokens import digest_of, sampled, take

PROMPT, SPACE, WORDS = [5, 6, 7], "ns", 100


def tokenized(sampling: dict[str, Any] | None = None, **more: Any) -> Any:
    """A request as SGLang sends it to its scheduler."""
    params = SamplingParams(**({"max_new_tokens": 16, "temperature": 0.7} | (sampling or {})))
    params.normalize(SimpleNamespace(encode=lambda text, **_: [1] * len(text)))
    said = {"input_text": None, "input_ids": array("q", PROMPT), "input_embeds": None, "mm_inputs": None}
    said |= {"token_type_ids": None, "return_logprob": False, "logprob_start_len": -1, "top_logprobs_num": 0}
    said |= {"token_ids_logprob": None, "stream": True}
    return TokenizedGenerateReqInput(rid="r", sampling_params=params, **(said | more))


def handed(token: object = 42, namespace: str = SPACE, **sampling: Any) -> bytes:
    """What a prefill worker says, which has computed one token of the same request."""
    return f"{token}x{digest_of(tokenized(sampling | {'max_new_tokens': 1}), namespace)}".encode()


def taken(value: bytes, asked: Any) -> Any:
    """The token that the scheduler is given; None: none."""
    is_taken = take(value, asked, SPACE, WORDS)
    found = (asked.sampling_params.custom_params or {}).get(FIRST)
    assert is_taken == (found is not None)
    return found


@pytest.mark.parametrize("token", [0, 42, WORDS - 1])
def test_an_answer_begins_with_the_token_of_its_prompt_and_parameters(token: int) -> None:
    assert taken(handed(token), tokenized()) == token
    assert taken(handed(token), tokenized({"stop": ["x"]})) == token
    assert taken(handed(token, temperature=0), tokenized({"temperature": 0})) == token
    own = {"__sglang_reasoning_end_token_ids": [3]}
    asked = tokenized({"custom_params": own})
    assert taken(handed(token), asked) == token
    assert asked.sampling_params.custom_params == {**own, FIRST: token}


@pytest.mark.parametrize("value", [b"", b"42", b"-1x0", b"1e3x0", b"42x" + b"0" * 32, b"\xffx\xff"], ids=repr)
def test_a_token_that_follows_from_anything_else_is_none(value: bytes) -> None:
    assert taken(value, tokenized()) is None


def test_prompt_namespace_parameters_and_vocabulary_must_be_the_same() -> None:
    assert taken(handed(WORDS), tokenized()) is None
    assert taken(handed(10**9), tokenized()) is None
    assert taken(handed(namespace="another revision"), tokenized()) is None
    assert taken(handed(), tokenized(input_ids=array("q", [*PROMPT, 8]))) is None
    assert taken(handed(), tokenized(input_ids=None)) is None
    for name, value in {"temperature": 0.8, "top_p": 0.9, "top_k": 5, "min_p": 0.1}.items():
        assert taken(handed(), tokenized({name: value})) is None, name
        assert taken(handed(**{name: value}), tokenized({name: value})) == 42, name
    assert taken(handed(), tokenized({"sampling_seed": 3})) is None
    assert taken(handed(), tokenized({"logit_bias": {"3": 1.0}})) is None


@pytest.mark.parametrize(
    "sampling",
    [
        {"frequency_penalty": 0.5},
        {"presence_penalty": 0.5},
        {"repetition_penalty": 1.1},
        {"min_new_tokens": 2},
        {"max_new_tokens": 1},
        {"json_schema": "{}"},
        {"regex": "a"},
        {"n": 2},
        {"custom_params": {"thinking_budget": 3}},
    ],
    ids=str,
)
def test_where_more_than_the_tokens_decides_an_answer_it_begins_here(sampling: dict[str, Any]) -> None:
    assert taken(handed(), tokenized(sampling)) is None


@pytest.mark.parametrize(
    "more",
    [
        {"return_logprob": True},
        {"return_hidden_states": True},
        {"lora_id": "L"},
        {"session_id": "s"},
        {"custom_logit_processor": "p"},
        {"bootstrap_room": 5},
        {"return_routed_experts": True},
        {"return_sampling_mask": True},
    ],
    ids=str,
)
def test_where_more_is_asked_of_a_token_than_itself_it_is_computed_here(more: dict[str, Any]) -> None:
    assert taken(handed(), tokenized(**more)) is None


def test_what_a_prefill_has_sampled_is_the_models_own() -> None:
    assert sampled([3], {"type": "length", "length": 1}) == 3
    assert sampled([2], {"type": "stop", "matched": 2}) == 2
    assert sampled([2], {"type": "stop", "matched": "NaN happened"}) is None
    assert sampled([], None) is None
    assert sampled(None, None) is None
