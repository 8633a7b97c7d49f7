"""What scripted workers say: a conversation's next turn has the pages of the last one."""

from __future__ import annotations

from benchmarks.hosts.script import PAGE_WORDS, answer_tokens, page_keys, text_of, words_of


def test_a_turn_begins_with_the_pages_of_the_one_before() -> None:
    question = [{"role": "user", "content": "a " * 40}]
    words = words_of({"messages": question})
    answer = "".join(map(text_of, answer_tokens(words, 30))).strip()
    stored = page_keys([*words, "assistant", *answer.split()])
    messages = [*question, {"role": "assistant", "content": answer}, {"role": "user", "content": "b " * 40}]
    following = page_keys(words_of({"messages": messages}))
    assert following[: len(stored)] == stored
    assert len(stored) == (1 + 40 + 1 + 30) // PAGE_WORDS
    assert len(set(following)) == len(following)


def test_the_answer_follows_from_the_prompt() -> None:
    assert answer_tokens(["a"], 20)[:5] == answer_tokens(["a"], 5)
    assert answer_tokens(["a"], 5) != answer_tokens(["b"], 5)
