"""Clients that hold conversations over two routers, and write down how each turn went.

`python -m tests.support.netns.scripted.talk CONFIG.json`. A conversation's next turn comes `think_s` after
the last one's end. A router that cannot be reached is passed over, as a balancer does. What failed is not
tried again, and the conversation goes on without it.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Final

import msgspec

from benchmarks.lib.client import Response, ServerClient
from pdserve.router.request.reports import CACHED_HEADER, PREFILL_CACHED_HEADER, parse_cached
from tests.support.netns.scripted.script import PAGE_WORDS, answer_tokens, text_of, words_of
from tests.support.processes import read_config

SILENCE_S: Final = 60.0


class TalkConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What the clients do."""

    name: str
    urls: list[str]
    out: str
    model: str
    clients: int
    words: int
    """Of a question."""
    answer_words: int
    most_words: int
    """Of a conversation, after which a new one begins."""
    think_s: float
    seed: int


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One question and its answer. Times are of CLOCK_MONOTONIC."""

    sent_s: float
    done_s: float
    first_s: float | None
    error: str
    detail: str
    worker: str
    """Who answered."""
    moved: bool
    """Not who answered the turn before."""
    known_words: int
    """Of the prompt: those in full pages of the turn before."""
    cached_words: int
    """Of these: those that were found."""
    is_right: bool
    """The whole answer, or the part that came, is the one that follows from the prompt."""


class Conversation:
    """One client's."""

    def __init__(self, config: TalkConfig, number: int) -> None:
        self._config = config
        self._draw = random.Random(f"{config.seed} {number}")
        self._number = number
        self._begun = 0
        self._said = ""
        self._known_words = 0
        self._worker = ""
        self._begin()

    def _begin(self) -> None:
        self._begun += 1
        self._said, self._known_words, self._worker = "", 0, ""

    async def turn(self, servers: Sequence[ServerClient]) -> Turn:
        """Ask the next question, of the first that can be reached."""
        config = self._config
        if len(self._said.split()) > config.most_words:
            self._begin()
        question = " ".join(f"q{self._draw.randrange(1 << 20)}" for _ in range(config.words))
        prompt = f"{self._said} {question}".lstrip()
        body = {
            "model": config.model,
            "prompt": prompt,
            "max_tokens": config.answer_words,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        headers = {"x-session-id": f"{config.name}-{self._number}-{self._begun}"}
        for server in servers:
            response = await server.request(body, headers)
            if not response.error.startswith("no connection"):
                break
        return self._note(prompt, response)

    def _note(self, prompt: str, response: Response) -> Turn:
        words = words_of({"prompt": prompt})
        right = "".join(map(text_of, answer_tokens(words, self._config.answer_words)))
        worker = response.headers.get("x-pdserve-decode", "")
        asked = (PREFILL_CACHED_HEADER, CACHED_HEADER)
        report = next((said for name in asked if (said := response.headers.get(name.decode()))), "")
        turn = Turn(
            sent_s=response.sent_s,
            done_s=response.done_s,
            first_s=response.first_s,
            error=response.error,
            detail=response.detail,
            worker=worker,
            moved=self._worker not in ("", worker),
            known_words=self._known_words,
            cached_words=min(self._known_words, parse_cached(report).get("pool", 0)),
            is_right=right.startswith(response.text) and bool(response.error or response.text == right),
        )
        if not response.error:
            self._said = f"{prompt} {response.text.strip()}"
            self._known_words = len(self._said.split()) // PAGE_WORDS * PAGE_WORDS
            self._worker = worker
        return turn


async def talk(config: TalkConfig, out: IO[bytes]) -> None:
    """Until SIGTERM ends the process. A line for each turn."""
    servers = [ServerClient(url, SILENCE_S) for url in config.urls]
    encode = msgspec.json.Encoder().encode

    async def converse(number: int) -> None:
        conversation = Conversation(config, number)
        order = servers[number % len(servers) :] + servers[: number % len(servers)]
        await asyncio.sleep(config.think_s * number / config.clients)
        while True:
            out.write(encode(await conversation.turn(order)) + b"\n")
            out.flush()
            await asyncio.sleep(config.think_s)

    async with asyncio.TaskGroup() as clients:
        for number in range(config.clients):
            clients.create_task(converse(number))


if __name__ == "__main__":
    told = read_config(sys.argv[1], TalkConfig)
    with Path(told.out).open("wb") as file:
        asyncio.run(talk(told, file))
