"""What a request may ask of SGLang's scheduler. That these end it, or hold it up, is seen in
tests/e2e/test_scheduler_limits.py; that each is looked at, in tests/engine/sglang/test_tokenizer_manager.py.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pdserve.engine.contract.sampling import (
    GRAMMARS,
    MAX_LOGPROBS,
    bound_sampling,
    check_ids,
    check_logprobs,
    check_texts,
)

VOCABULARY = 4096


@pytest.mark.parametrize("ids", [[-1, 5], [5, VOCABULARY], [10**30], [-(10**30)]])
def test_tokens_that_the_model_does_not_have_are_refused(ids: list[int]) -> None:
    check_ids([], VOCABULARY)
    check_ids([0, VOCABULARY - 1], VOCABULARY)
    with pytest.raises(ValueError, match="vocabulary"):
        check_ids(ids, VOCABULARY)


@pytest.mark.parametrize(
    ("prompt", "output", "each"),
    [(0, 1, VOCABULARY + 1), (MAX_LOGPROBS // 5, 1, 5), (10, MAX_LOGPROBS, 1)],
)
def test_more_log_probabilities_than_there_are_or_than_can_be_made_are_refused(
    prompt: int, output: int, each: int
) -> None:
    check_logprobs(100, 100, VOCABULARY, VOCABULARY)
    with pytest.raises(ValueError, match="log-probabilities"):
        check_logprobs(prompt, output, each, VOCABULARY)


def sampling(**fields: Any) -> Any:
    usual = {"top_k": 50, "min_new_tokens": 3, "stop_token_ids": None, "stop_regex_strs": []}
    return SimpleNamespace(**usual | fields)


@pytest.mark.parametrize("grammar", GRAMMARS)
def test_a_grammar_that_may_be_over_before_the_least_tokens_is_refused(grammar: str) -> None:
    """Seen: SGLang's sampler had no token left to choose, and the scheduler ended for everybody."""
    with pytest.raises(ValueError, match="min_tokens cannot be combined"):
        bound_sampling(sampling(min_new_tokens=20, **{grammar: "a"}), VOCABULARY)
    for usual in (sampling(min_new_tokens=0, **{grammar: "a"}), sampling(stop_token_ids={2})):
        before = dict(vars(usual))
        bound_sampling(usual, VOCABULARY)
        assert vars(usual) == before


@pytest.mark.parametrize(
    ("field", "said"), [("lora_name", "lora_path"), ("extra_key", "extra_key"), ("cache_salt", "cache_salt")]
)
def test_a_list_where_there_is_one_prompt_is_refused(field: str, said: str) -> None:
    """Seen: a list of adapters for one prompt ended the scheduler for everybody."""
    for value in ("a", None):
        check_texts(SimpleNamespace(**{field: value}))
    with pytest.raises(ValueError, match=f"{said} must be a string"):
        check_texts(SimpleNamespace(**{field: ["a"]}))
