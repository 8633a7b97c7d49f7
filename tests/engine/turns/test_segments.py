"""Cutting prompts at stop tokens, keys, and which tokens fit: with a real tokenizer that often encodes a text
to other tokens than it was made of.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.engine.demo.chat import TURN_END
from pdserve.engine.turns.segments import Prompt, StopTokens, alike, cut, scope_of
from tests.support.engine.turns import OPENING, decode, encode, end, said, tokenizer
from tests.support.suite.extended import examples

SCOPE = scope_of("t", None, None, "tenant/a")


@cache
def vocabulary() -> int:
    return int(tokenizer().get_vocab_size())


def stops() -> StopTokens:
    return StopTokens({end(): TURN_END})


def prompt_of(text: str, scope: bytes = SCOPE) -> Prompt:
    made = cut(text, encode(text), stops(), scope)
    assert made is not None
    return made


ordinary = st.integers(9, 590)  # no special token
answers = st.lists(ordinary, min_size=1, max_size=30)


def test_a_prompt_has_the_tokens_it_was_cut_from() -> None:
    text = said("system", "Be brief.") + "\n" + said("user", "Hi") + OPENING
    prompt = prompt_of(text)
    assert prompt.texts == ["<|im_start|>system\nBe brief.", "\n<|im_start|>user\nHi", OPENING]
    assert prompt.with_ids({}) == encode(text)
    assert len(prompt.keys) == 2


@settings(max_examples=examples(200), deadline=None)
@given(answers, answers)
def test_the_next_turn_has_the_very_tokens_that_the_model_had(first: list[int], second: list[int]) -> None:
    text = said("user", "Hi") + OPENING
    tokens = encode(text)
    known: dict[bytes, Sequence[int]] = {}
    for answer in (first, second):
        prompt = prompt_of(text)
        fitting = {
            number: known[key]
            for number, key in enumerate(prompt.keys)
            if key in known and prompt.fits(number, known[key], decode, vocabulary())
        }
        assert prompt.with_ids(fitting) == tokens
        said_now = [*encode(OPENING), *answer]
        key = prompt.answered(said_now, decode)
        generated = decode([end(), *encode(OPENING), *answer])[len(TURN_END + OPENING) :]
        if not generated:
            return
        assert key is not None
        known[key] = said_now
        more = "\n" + said("user", "Go on") + OPENING
        text, tokens = text + generated + TURN_END + more, [*tokens, *answer, end(), *encode(more)]


def test_without_recorded_tokens_the_next_turn_often_has_others() -> None:
    """Else the tests above show nothing."""
    answer = [300, 301, 302, 303, 304, 305]
    assert encode(decode(answer)) != answer


@settings(max_examples=examples(300), deadline=None)
@given(st.data())
def test_whoever_has_another_scope_finds_nothing(data: st.DataObject) -> None:
    """Tenants, salts, extra keys, adapters and tokenizers; fields do not run into each other."""
    field = st.one_of(st.none(), st.text(max_size=4))
    parts = st.tuples(st.text(max_size=4), field, field, field)
    one, other = data.draw(parts), data.draw(parts)
    text = (
        said("user", data.draw(st.text(max_size=10).filter(str.isascii))) + OPENING + "x" + TURN_END + OPENING
    )
    keys, others = prompt_of(text, scope_of(*one)).keys, prompt_of(text, scope_of(*other)).keys
    normal = [(*parts[:3], parts[3] or None) for parts in (one, other)]
    if normal[0] == normal[1]:
        assert keys == others
    else:
        assert not set(keys) & set(others)


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.text("ab<|>im_end\n", max_size=8), min_size=1, max_size=5), st.data())
def test_a_key_stands_for_the_whole_conversation(messages: list[str], data: st.DataObject) -> None:
    """One other character anywhere before it makes another key; what comes behind it does not."""
    place = data.draw(st.integers(0, len(messages) - 1))
    changed = [*messages[:place], messages[place] + "!", *messages[place + 1 :]]
    one, other = (prompt_of("".join(said("user", m) for m in ms) + OPENING) for ms in (messages, changed))
    before = len(prompt_of("".join(said("user", m) for m in messages[:place])).keys)
    assert one.keys[:before] == other.keys[:before]
    assert not set(one.keys[before:]) & set(other.keys)


def test_false_tokens_do_not_fit() -> None:
    text = said("user", "Hi") + OPENING + "Hello" + TURN_END + OPENING
    prompt = prompt_of(text)
    right = encode(OPENING) + [encode(letter)[0] for letter in "Hello"]
    assert prompt.fits(1, right, decode, vocabulary())
    assert prompt.with_ids({1: right}) != prompt.with_ids({})
    wrong = [
        [],
        right[:-1],
        [*right, right[-1]],
        [*right, end()],
        [vocabulary(), *right[1:]],
        [-1, *right[1:]],
        encode(OPENING + "Hallo"),
        right * 100,
    ]
    assert not any(prompt.fits(1, ids, decode, vocabulary()) for ids in wrong)


def test_an_answer_that_was_cut_short_is_found_too() -> None:
    """The template closes it."""
    text = said("user", "Hi") + OPENING
    key = prompt_of(text).answered([*encode(OPENING), *encode("Hel")], decode)
    assert key is not None
    following = prompt_of(text + "Hel" + TURN_END + OPENING)
    assert following.keys[1] == key


def test_the_answers_are_told_by_what_precedes_them() -> None:
    text = said("system", "s") + "\n" + said("user", "Hi") + OPENING + "Hello" + TURN_END
    prompt = prompt_of(text + "\n" + said("user", "Bye") + OPENING)
    assert prompt.candidates(1) == [2]
    assert prompt.candidates(2) == [0, 1, 2, 3]  # something is otherwise: all come into question


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=3), JSON, min_size=1), st.sampled_from(["", "{ no { ", '{"x']))
def test_one_object_is_alike_in_whatever_way_it_is_written(value: object, before: str) -> None:
    ways = [json.dumps(value), json.dumps(value, indent=2), json.dumps(value, separators=(",", ":"))]
    ways.append(json.dumps(value, ensure_ascii=True, sort_keys=True))
    assert len({alike(f"{before}{way} and more") for way in ways}) == 1
    assert json.loads(alike(ways[0])) == value


@pytest.mark.parametrize("text", ["no object", "if (a) { b(); }", '{"a": 1', "{", "[1,  2]"])
def test_a_text_without_an_object_is_as_it_was(text: str) -> None:
    assert alike(text) == text


@pytest.mark.parametrize("text", ['{"a":' * 100_000, '{"a": "' * 100_000, '{"a"' * 300_000])
def test_a_text_made_to_cost_time_costs_little(text: str) -> None:
    begun_s = time.process_time()
    assert alike(text) == text
    assert time.process_time() - begun_s < 2.0
