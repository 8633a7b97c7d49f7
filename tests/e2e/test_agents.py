"""Agents before a real cluster: each turn finds the pages of the turn before, as its client is told."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.agents import CHAT, CLIENTS, MESSAGES, TURNS, Client, whole_pages
from tests.support.e2e.cluster import Router, free_port, http
from tests.support.e2e.prompts import PAGE
from tests.support.e2e.site import Cluster

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]

CLAUDE_CODE = next(client for client in CLIENTS if client.name == "Claude Code")
ADMIN = "administrators-key-of-these-tests"
NAMED = ("Claude Code", "Codex", "OpenCode", "Open WebUI", "OpenAI SDK")


@dataclass
class Turn:
    """One answered turn."""

    prompt_tokens: int
    cached_tokens: int
    text: str
    headers: httpx.Headers
    seconds: float


def ask(router: Router, client: Client, turn: int, answers: list[str]) -> Turn:
    begun_s = time.monotonic()
    body = client.body(turn, answers)
    answer = http.post(f"{router.url}{client.path}", json=body, headers=client.headers, timeout=120.0)
    seconds = time.monotonic() - begun_s
    assert answer.status_code == 200, (client.name, turn, answer.text)
    said = answer.json()
    usage = said["usage"]
    if client.path == MESSAGES:
        cached = usage.get("cache_read_input_tokens") or 0
        prompt = usage["input_tokens"] + cached + (usage.get("cache_creation_input_tokens") or 0)
        texts = [block["text"] for block in said["content"] if block["type"] == "text"]
        return Turn(prompt, cached, "".join(texts), answer.headers, seconds)
    if client.path == CHAT:
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        text = said["choices"][0]["message"]["content"] or ""
        return Turn(usage["prompt_tokens"], cached, text, answer.headers, seconds)
    cached = (usage.get("input_tokens_details") or {}).get("cached_tokens") or 0
    parts: list[Any] = [part for item in said["output"] for part in item.get("content") or ()]
    return Turn(usage["input_tokens"], cached, "".join(one["text"] for one in parts), answer.headers, seconds)


def conversation(router: Router, client: Client, turns: int = TURNS) -> Iterator[Turn]:
    answers: list[str] = []
    for number in range(turns):
        turn = ask(router, client, number, answers)
        answers.append(turn.text)
        yield turn


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_each_turn_of_an_agent_finds_the_pages_of_the_turn_before(cluster: Cluster, client: Client) -> None:
    turns = list(conversation(cluster.router, client))
    for before, now in itertools.pairwise(turns):
        print(f"{client.name}: {now.prompt_tokens} tokens, {now.cached_tokens} cached")
        assert now.prompt_tokens > before.prompt_tokens
        assert now.cached_tokens <= now.prompt_tokens
        assert now.cached_tokens >= 0.95 * whole_pages(before.prompt_tokens, PAGE)
        assert "prefill=no-stage" not in now.headers["x-pdserve-plan"]
        if client.name in NAMED:
            assert "decode=session" in now.headers["x-pdserve-plan"]


def test_a_session_that_was_deleted_is_found_nowhere(cluster: Cluster, run_dir: Path) -> None:
    port = free_port()
    extra = {"admin": {"port": port, "key": ADMIN}}
    with Router(run_dir, cluster.prefill, cluster.decode, name="router-admin", extra=extra) as router:
        list(conversation(router, CLAUDE_CODE))
        again = ask(router, CLAUDE_CODE, 0, [])
        assert again.cached_tokens >= 0.95 * whole_pages(again.prompt_tokens, PAGE)
        told = http.post(
            f"http://127.0.0.1:{port}/pages/erase",
            json={"session": CLAUDE_CODE.headers["x-claude-code-session-id"]},
            headers={"authorization": f"Bearer {ADMIN}"},
            timeout=120.0,
        ).json()
        print(told)
        assert (told["erased"], told["problems"], told["turns"]) == (True, {}, TURNS + 1)
        assert sum(told["pages"].values()) > 0
        assert ask(router, CLAUDE_CODE, 0, []).cached_tokens == 0


@contextmanager
def keeping_nonces(cluster: Cluster, run_dir: Path) -> Iterator[Router]:
    extra = {"keep_nonces": True}
    with Router(run_dir, cluster.prefill, cluster.decode, name="router-nonces", extra=extra) as router:
        yield router


def test_without_its_nonce_claude_code_finds_what_it_would_not(cluster: Cluster, run_dir: Path) -> None:
    with keeping_nonces(cluster, run_dir) as keeping:
        kept = list(conversation(keeping, CLAUDE_CODE))
    stripped = list(conversation(cluster.router, CLAUDE_CODE))
    for before, without in zip(kept[1:], stripped[1:], strict=True):
        print(f"cached {before.cached_tokens} -> {without.cached_tokens} of {without.prompt_tokens} tokens")
        print(f"seconds {before.seconds:.3f} -> {without.seconds:.3f}")
        assert "x-pdserve-stripped" not in before.headers
        assert without.headers["x-pdserve-stripped"] == "x-anthropic-billing-header"
        assert before.cached_tokens <= PAGE
        assert without.cached_tokens > 0.5 * without.prompt_tokens
