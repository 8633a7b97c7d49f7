"""What exact turns do to prompts, with records that are there, late, lost, false, or another tenant's."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.engine.demo.chat import TURN_END
from pdserve.engine.turns.exact import Asked
from pdserve.engine.turns.shelf import LateError
from tests.support.engine.turns import OPENING, Records, Worker, asked, decode, encode, end, letters, said
from tests.support.random_model import CHAT_TEMPLATE
from tests.support.suite.extended import examples

FIRST = said("user", "Hi") + OPENING
SECOND = FIRST + "Hello there" + TURN_END + "\n" + said("user", "Go on") + OPENING
THIRD = SECOND + "With what?" + TURN_END + "\n" + said("user", "All") + OPENING


async def first_answered(worker: Worker, **more: Any) -> list[int]:
    """The first turn, answered letter by letter; all its tokens."""
    answer = letters("Hello there")
    return [*await worker.answers(asked(FIRST, 0, **more), answer), *answer, end()]


async def test_the_next_prompt_begins_with_the_very_tokens_of_the_conversation() -> None:
    worker = Worker(Records())
    had = await first_answered(worker)
    ids = await worker.answers(asked(SECOND, 1), letters("With what?"))
    assert ids[: len(had)] == had
    assert decode(ids) == SECOND
    assert ids != encode(SECOND)
    had = [*ids, *letters("With what?"), end()]
    ids = await worker.answers(asked(THIRD, 2), [])
    assert ids[: len(had)] == had
    assert worker.outcomes == ["spliced", "spliced"]


WRITTEN = '{"name": "ls", "arguments": {"path": "/tmp",  "depth": 2, "é": [1, {}]}}'
ANEW = '{"name": "ls", "arguments": {"depth":2,"path":"/tmp","\\u00e9":[1,{}]}}'


@pytest.mark.parametrize("sent_back", [WRITTEN, ANEW, json.dumps(json.loads(WRITTEN), indent=1)])
async def test_a_call_of_a_tool_keeps_its_tokens_however_its_client_writes_it(sent_back: str) -> None:
    worker = Worker(Records())
    said_then, said_now = (f"Look.\n<tool_call>\n{one}\n</tool_call>" for one in (WRITTEN, sent_back))
    answer = [*letters("Look."), *encode(said_then.removeprefix("Look."))]
    had = [*await worker.answers(asked(FIRST, 0), answer), *answer, end()]
    text = FIRST + said_now + TURN_END + "\n" + said("user", '{"a":  1}') + OPENING
    ids = await worker.answers(asked(text, 1), [])
    assert ids[: len(had)] == had
    assert decode(ids) == text.replace(said_now, said_then)
    assert worker.outcomes == ["spliced"]


@pytest.mark.parametrize(
    ("first", "answer", "following"),
    [
        # another call of a tool has tokens of its own
        (FIRST, encode(WRITTEN), FIRST + WRITTEN.replace("2", "3") + TURN_END + OPENING),
        # and only an answer is written anew by its client: never what a user said
        (
            said("user", WRITTEN) + OPENING,
            letters("Hello"),
            said("user", ANEW) + OPENING + "Hello" + TURN_END + OPENING,
        ),
    ],
)
async def test_what_says_something_else_is_encoded(first: str, answer: list[int], following: str) -> None:
    worker = Worker(Records())
    await worker.answers(asked(first, 0), answer)
    assert await worker.answers(asked(following, 1), []) == encode(following)


async def test_another_worker_and_a_restarted_one_find_the_records_in_the_pool() -> None:
    records = Records()
    had = await first_answered(Worker(records))
    other = Worker(records)
    assert (await other.answers(asked(SECOND, 1), []))[: len(had)] == had
    assert (await other.answers(asked(SECOND, 1), []))[: len(had)] == had
    assert len(records.asked) == 1, "then it has them at hand"


async def test_without_a_pool_a_worker_knows_its_own_answers() -> None:
    worker = Worker()
    had = await first_answered(worker)
    assert (await worker.answers(asked(SECOND, 1), []))[: len(had)] == had
    assert await Worker().answers(asked(SECOND, 1), []) == encode(SECOND)


async def test_an_answer_whose_text_has_the_same_tokens_is_counted_so() -> None:
    records = Records()
    worker = Worker(records)
    await worker.answers(asked(FIRST, 0), encode("Hello there"))
    assert (records.asked, worker.outcomes) == ([], []), "a first turn asks the pool nothing"
    assert await worker.answers(asked(SECOND, 1), []) == encode(SECOND)
    assert worker.outcomes == ["same"]


@pytest.mark.parametrize(
    ("trouble", "outcome"), [(LateError(), "late"), (None, "unknown")], ids=["late", "nothing there"]
)
async def test_without_records_the_text_is_encoded(trouble: Exception | None, outcome: str) -> None:
    records = Records()
    records.error = trouble
    worker = Worker(records)
    assert await worker.answers(asked(SECOND, 1), []) == encode(SECOND)
    assert worker.outcomes == [outcome]


async def test_recorded_tokens_never_make_a_prompt_too_long() -> None:
    worker = Worker(Records())
    had = await first_answered(worker)
    plain = encode(SECOND)
    for most, outcome in ((len(plain), "too_long"), (len(plain) + len(had), "spliced")):
        worker.outcomes.clear()
        await worker.answers(asked(SECOND, 1, most_tokens=most), [])
        assert worker.outcomes == [outcome]


async def test_the_decode_worker_takes_what_the_prefill_worker_took() -> None:
    """Whatever it knows itself: its own answer, which the prefill worker has not found, too."""
    records = Records()
    decoder, prefiller = Worker(records), Worker(records)
    await first_answered(decoder)
    for trouble in (LateError(), None):
        records.error = trouble
        chosen = await prefiller.turns.prompt(asked(SECOND, 1))
        assert chosen is not None
        assert await decoder.answers(asked(SECOND, 1), [], chosen.replaced) == chosen.ids
    assert prefiller.outcomes == ["late", "spliced"]
    assert decoder.outcomes == ["spliced"]


async def test_a_record_that_was_lost_between_two_workers_costs_a_miss() -> None:
    records = Records()
    await first_answered(Worker(records))
    chosen = await Worker(records).turns.prompt(asked(SECOND, 1))
    assert chosen is not None
    assert chosen.replaced
    records.kept.clear()
    decoder = Worker(records)
    assert await decoder.answers(asked(SECOND, 1), [], chosen.replaced) == encode(SECOND)
    assert decoder.outcomes == ["lost"]


@settings(max_examples=examples(200), deadline=None)
@given(st.integers(0, 2**70))
def test_whatever_a_header_says_the_text_stays(wanted: int) -> None:
    async def run() -> None:
        worker = Worker(Records())
        await first_answered(worker)
        assert decode(await worker.answers(asked(SECOND, 1), [], wanted)) == SECOND

    asyncio.run(run())


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.integers(-5, 700), max_size=40) | st.just(letters("Hello thera")))
def test_whatever_the_pool_gives_the_text_stays(false: list[int]) -> None:
    """A false record can only cost a miss."""

    async def run() -> None:
        records = Records()
        await first_answered(Worker(records))
        records.kept = dict.fromkeys(records.kept, false)
        worker = Worker(records)
        ids = await worker.answers(asked(SECOND, 1), [])
        assert decode(ids) == SECOND
        assert len(ids) <= len(SECOND)
        assert worker.outcomes in (["refused"], ["same"], ["spliced"])

    asyncio.run(run())


TENANTS = ("a", "b", "c")
OWN = {
    "a": encode("Hello there"),
    "b": letters("Hello there"),
    "c": [*letters("Hello"), *encode(" there")],
}
"""The same words, of other tokens for each tenant."""


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.tuples(st.sampled_from(TENANTS), st.integers(0, 1), st.booleans()), max_size=12))
def test_tenants_are_never_mixed(requests: list[tuple[str, int, bool]]) -> None:
    """Tenants who say the same to the same workers: each gets its own tokens or the text's, in any order."""

    async def run() -> None:
        records = Records()
        workers = [Worker(records), Worker(records)]
        spoke: set[str] = set()
        for tenant, number, goes_on in requests:
            salt = {"cache_salt": f"tenant/{tenant}"}
            if not goes_on:
                await workers[number].answers(asked(FIRST, 0, **salt), OWN[tenant])
                spoke.add(tenant)
                continue
            ids = await workers[number].answers(asked(SECOND, 1, **salt), [])
            had = [*encode(FIRST), *OWN[tenant], end()] if tenant in spoke else encode(SECOND)
            assert ids[: len(had)] == had

    asyncio.run(run())


@pytest.mark.parametrize("field", ["adapter", "extra_key", "cache_salt"])
async def test_adapters_keys_and_salts_have_records_of_their_own(field: str) -> None:
    worker = Worker(Records())
    had = await first_answered(worker, **{field: "x"})
    for value in (None, "y"):
        assert await worker.answers(asked(SECOND, 1, **{field: value}), []) == encode(SECOND)
    assert (await worker.answers(asked(SECOND, 1, **{field: "x"}), []))[: len(had)] == had


def rendered(template: str, messages: list[dict[str, Any]], **more: Any) -> str:
    """By Hugging Face's own renderer, as SGLang does it."""
    from transformers import PreTrainedTokenizerFast

    from tests.support.engine.turns import tokenizer

    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer())
    return str(
        fast.apply_chat_template(
            messages, chat_template=template, tokenize=False, add_generation_prompt=True, **more
        )
    )


TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
CALLED = '\n<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
CALL = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}


def tool_loop(steps: int) -> list[dict[str, Any]]:
    """A question, and so many calls with their results."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Is it raining?"}]
    for step in range(steps):
        messages.append({"role": "assistant", "content": "", "tool_calls": [CALL]})
        messages.append({"role": "tool", "content": f"dry, {step} mm"})
    return messages


async def test_tool_calls_keep_their_tokens_through_a_long_loop() -> None:
    worker, had = Worker(Records()), list[int]()
    answer = [*encode("\n"), *encode("<tool_call>"), *letters(CALLED[12:-12]), *encode("</tool_call>")]
    assert decode(answer) == CALLED
    for step in range(30):
        text = rendered(CHAT_TEMPLATE, tool_loop(step), tools=TOOLS)
        ids = await worker.answers(asked(text, step), answer)
        assert decode(ids) == text
        assert ids[: len(had)] == had
        had = [*ids, *answer, end()]
    assert worker.outcomes == ["spliced"] * 29


async def test_other_tools_or_template_arguments_make_another_conversation() -> None:
    worker = Worker(Records())
    one = rendered(CHAT_TEMPLATE, tool_loop(0), tools=TOOLS)
    await worker.answers(asked(one, 0), letters(CALLED))
    for more in ({"tools": [*TOOLS, *TOOLS]}, {}):
        text = rendered(CHAT_TEMPLATE, tool_loop(1), **more)
        assert await worker.answers(asked(text, 1), []) == encode(text)


DROPS_REASONING = CHAT_TEMPLATE.replace(
    "{{- '<|im_start|>assistant\\n' + content }}",
    "{{- '<|im_start|>assistant\\n' + content.split('</think>')[-1] }}",
)
TRIMS = CHAT_TEMPLATE.replace(
    "{{- '<|im_start|>assistant\\n' + content }}", "{{- '<|im_start|>assistant\\n' + content | trim }}"
)


@pytest.mark.parametrize("template", [DROPS_REASONING, TRIMS], ids=["drops reasoning", "trims"])
async def test_a_template_that_shows_answers_otherwise_is_encoded(template: str) -> None:
    assert template != CHAT_TEMPLATE
    worker = Worker(Records())
    answer = "<think>Hm.</think> Yes "
    question = {"role": "user", "content": "Is it?"}
    await worker.answers(asked(rendered(template, [question]), 0), letters(answer))
    chat = [question, {"role": "assistant", "content": answer}, question]
    text = rendered(template, chat)
    assert await worker.answers(asked(text, 1), []) == encode(text)
    assert worker.outcomes == ["unknown"]


async def test_a_prompt_that_cannot_be_cut_stays_as_it_is() -> None:
    worker = Worker(Records())
    assert await worker.turns.prompt(Asked(SECOND, [*encode(SECOND), end()], 1)) is None
    assert worker.outcomes == ["not_cut"]


async def test_a_long_prompt_and_a_long_record_are_handled_in_threads_all_the_same() -> None:
    records = Records()
    words = "much " * 20_000
    text = said("user", words) + OPENING
    answer = letters("a long answer " * 300)
    had = [*await Worker(records).answers(asked(text, 0), answer), *answer, end()]
    following = text + decode(answer) + TURN_END + OPENING
    assert (await Worker(records).answers(asked(following, 1), []))[: len(had)] == had
