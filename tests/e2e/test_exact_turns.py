"""Conversations whose answers keep their tokens, on real servers: what is computed, answered and found. The
demo model's answers nearly always encode to other tokens than it generated.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.support.e2e.cluster import Router, Worker, http, metric
from tests.support.e2e.prompts import PAGE
from tests.support.e2e.routed import found, publishes
from tests.support.e2e.site import Cluster
from tests.support.router.redis_server import redis_server

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]

TURNS = 5
KEY = "administrators-key-of-these-tests"
SAYS = (
    "Tell me about the weather in Paris, the price of bread in Berlin, and the way from Lisbon to Porto. ",
    "Who wrote the first program, and how many days are there in February of a year that divides by four? ",
)
IDS = {"x-sglext-return-input-ids": "1", "x-sglext-return-output-ids": "1"}


@dataclass
class Turn:
    """One answered turn."""

    prompt_ids: list[int]
    output_ids: list[int]
    text: str
    prompt_tokens: int
    cached_tokens: int

    @property
    def computed(self) -> int:
        return self.prompt_tokens - self.cached_tokens


@dataclass
class Conversation:
    """A chat that sends back what it was told."""

    topic: str
    more: dict[str, Any] = field(default_factory=dict)
    messages: list[dict[str, Any]] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)

    def body(self, **more: Any) -> dict[str, Any]:
        said = f"{self.topic} {len(self.messages)}: " + SAYS[len(self.turns) % 2] * 2
        self.messages.append({"role": "user", "content": said})
        fixed = {
            "model": "demo-tiny",
            "temperature": 0,
            "max_tokens": 48,
            "return_cached_tokens_details": True,
        }
        return {**fixed, **self.more, **more, "messages": self.messages}

    def ask(self, server: Worker | Router, **headers: str) -> Any:
        """The next turn; the HTTP answer."""
        answer = http.post(
            f"{server.url}/v1/chat/completions", json=self.body(), headers={**IDS, **headers}, timeout=120.0
        )
        assert answer.status_code == 200, answer.text
        said = answer.json()
        usage, text = said["usage"], said["choices"][0]["message"]["content"]
        ids = said.get("sglext") or {}
        self._heard(
            Turn(
                ids.get("input_ids") or [],
                (ids.get("output_ids") or [[]])[0],
                text,
                usage["prompt_tokens"],
                (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0),
            )
        )
        return answer

    def stream(self, server: Worker | Router, **headers: str) -> None:
        """The next turn, streamed."""
        body = self.body(stream=True, stream_options={"include_usage": True})
        text, usage = "", {}
        with http.stream(
            "POST", f"{server.url}/v1/chat/completions", json=body, headers=headers, timeout=120.0
        ) as answer:
            assert answer.status_code == 200
            for event in _events(answer.iter_lines()):
                for choice in event["choices"]:
                    text += choice["delta"].get("content") or ""
                usage = event.get("usage") or usage
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        self._heard(Turn([], [], text, usage["prompt_tokens"], cached))

    def _heard(self, turn: Turn) -> None:
        self.turns.append(turn)
        self.messages.append({"role": "assistant", "content": turn.text})


def _events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


def turned(worker: Worker, outcome: str) -> float:
    """How many turns of the worker had this outcome so far."""
    return metric(worker.url, "pdserve_worker_exact_turns_total", outcome=outcome)


def whole_pages(turn: Turn) -> int:
    """Tokens whose pages a turn leaves behind: of the last token nothing was computed."""
    return (len(turn.prompt_ids) + len(turn.output_ids) - 1) // PAGE * PAGE


def test_a_conversation_goes_on_from_the_very_tokens_it_had(agg_worker: Worker, plain_worker: Worker) -> None:
    """Each prompt begins with all that the model had seen and said; whole pages of it are found; and plain
    SGLang answers the same from the same tokens.
    """
    exact, plain = Conversation("Exactly"), Conversation("Exactly")
    for _ in range(TURNS):
        exact.ask(agg_worker)
        plain.ask(plain_worker)
    for before, turn in zip(exact.turns, exact.turns[1:], strict=False):
        had = [*before.prompt_ids, *before.output_ids]
        assert turn.prompt_ids[: len(had)] == had
        assert turn.cached_tokens == whole_pages(before)
    others = sum(
        turn.prompt_ids[: len(had)] != had
        for before, turn in zip(plain.turns, plain.turns[1:], strict=False)
        if (had := [*before.prompt_ids, *before.output_ids])
    )
    assert others >= TURNS - 2, "the tokenizer of this test should encode answers to other tokens"
    later = slice(1, None)
    computed = [sum(turn.computed for turn in one.turns[later]) for one in (exact, plain)]
    print(f"turns with other tokens: {others} of {TURNS - 1}; computed exact, plain: {computed}")
    assert computed[0] < computed[1]
    for number, turn in enumerate(exact.turns):
        messages = exact.messages[: 2 * number + 1]
        body = {"model": "demo-tiny", "temperature": 0, "max_tokens": 48, "messages": messages}
        same = http.post(
            f"{plain_worker.url}/v1/chat/completions",
            json={**body, "input_ids": turn.prompt_ids},
            headers=IDS,
            timeout=120.0,
        ).json()
        assert same["sglext"]["output_ids"][0] == turn.output_ids
        assert same["choices"][0]["message"]["content"] == turn.text


def _items(server: Worker) -> list[tuple[int, int, int]]:
    """A conversation of Responses that sends all items back; (prompt, cached, answer) tokens of each turn."""
    items: list[dict[str, Any]] = []
    turns = []
    for number in range(TURNS):
        items.append({"role": "user", "content": f"Item {number}: " + SAYS[number % 2] * 2})
        body = {"model": "demo-tiny", "temperature": 0, "max_output_tokens": 48, "store": False}
        answer = http.post(f"{server.url}/v1/responses", json={**body, "input": items}, timeout=120.0)
        assert answer.status_code == 200, answer.text
        said = answer.json()
        items += said["output"]
        usage = said["usage"]
        cached = usage["input_tokens_details"]["cached_tokens"]
        turns.append((usage["input_tokens"], cached, usage["output_tokens"]))
    return turns


def test_items_of_responses_go_on_from_the_very_tokens_as_chats_do(
    agg_worker: Worker, plain_worker: Worker
) -> None:
    exact, plain = _items(agg_worker), _items(plain_worker)
    for (prompt, _, output), (_, cached, _) in pairwise(exact):
        assert cached == (prompt + output - 1) // PAGE * PAGE
    assert sum(prompt - cached for prompt, cached, _ in exact) < sum(
        prompt - cached for prompt, cached, _ in plain
    )


def test_tenants_find_no_tokens_of_each_other(agg_worker: Worker) -> None:
    """The same words under another salt: nothing is found, and nothing is spliced."""
    one, other = Conversation("Salted", {"cache_salt": "a"}), Conversation("Salted", {"cache_salt": "b"})
    one.ask(agg_worker)
    other.messages = [dict(message) for message in one.messages]
    unknown, spliced = (turned(agg_worker, outcome) for outcome in ("unknown", "spliced"))
    other.ask(agg_worker)
    assert turned(agg_worker, "unknown") == unknown + 1
    assert turned(agg_worker, "spliced") == spliced
    one.ask(agg_worker)
    assert turned(agg_worker, "spliced") == spliced + 1


@pytest.mark.extended
def test_an_answer_that_the_client_changed_is_encoded(agg_worker: Worker) -> None:
    chat = Conversation("Changed")
    chat.ask(agg_worker)
    chat.messages[-1]["content"] += "!"
    before = turned(agg_worker, "unknown")
    chat.ask(agg_worker)
    assert turned(agg_worker, "unknown") == before + 1


def test_prefill_and_decode_workers_use_the_same_tokens(cluster: Cluster) -> None:
    """Streams and others, on one pair and then on another, whose workers have only the pool's records."""
    chat, [here, there] = Conversation("Pairs"), cluster.pairs
    for number, router in enumerate(cluster.pairs):
        publishes(router, 970_000 + 1000 * number)
    chat.ask(here)
    chat.stream(here)
    answer = chat.ask(here)
    prefill = cluster.workers[0]
    while turned(prefill, "spliced") < 2 and len(chat.turns) < 2 * TURNS:
        answer = chat.ask(here)  # a record that is still on its way to the pool costs a turn its splice
    assert turned(prefill, "spliced") >= 2
    last = chat.turns[-1]
    assert sum(found(answer).values()) >= (last.prompt_tokens - 1) // PAGE * PAGE, "decode found all of it"
    others = cluster.prefill[1], cluster.decode[1]
    before = [turned(worker, "spliced") for worker in others]
    answer = chat.ask(there)
    assert [turned(worker, "spliced") for worker in others] == [count + 1 for count in before]
    earlier, last = chat.turns[-2:]
    assert last.cached_tokens >= (earlier.prompt_tokens // PAGE) * PAGE
    assert sum(found(answer).values()) >= (last.prompt_tokens - 1) // PAGE * PAGE


@pytest.mark.extended
def test_a_conversation_goes_on_at_another_router_as_it_was(cluster: Cluster, run_dir: Path) -> None:
    """By the same workers, though the first router had moved it, and from the very tokens."""
    with redis_server(run_dir) as redis, ExitStack() as stack:
        extra = {"redis": {"url": redis.url}, "admin": {"key": KEY, "port": 0}}
        here, there = (
            Router(run_dir, cluster.prefill, cluster.decode, name=f"router-sharing{i}", extra=extra)
            for i in range(2)
        )
        for router in (here, there):
            stack.callback(router.stop)
            router.start()
        chat = Conversation("Routers")
        session = {"x-session-id": "of-two-routers"}
        homes = [chat.ask(server, **session).headers["x-pdserve-decode"] for server in (here, there, here)]
        assert len(set(homes)) == 1
        moves = http.post(
            f"{_admin(here)}/workers/{homes[0]}/drain", headers={"authorization": f"Bearer {KEY}"}
        )
        assert moves.status_code == 200, moves.text
        moved = chat.ask(here, **session).headers["x-pdserve-decode"]
        before = sum(turned(worker, "spliced") for worker in cluster.workers)
        answer = chat.ask(there, **session)
        assert answer.headers["x-pdserve-decode"] == moved != homes[0]
        assert "decode=session" in answer.headers["x-pdserve-plan"]
        assert sum(turned(worker, "spliced") for worker in cluster.workers) == before + 2
        earlier, last = chat.turns[-2:]
        assert last.cached_tokens >= (earlier.prompt_tokens // PAGE) * PAGE


def _admin(router: Router) -> str:
    assert router.process is not None
    (port,) = re.findall(r"admin API on port (\d+)", router.process.tail())
    return f"http://127.0.0.1:{port}"
