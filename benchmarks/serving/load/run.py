"""Sends a load to a server and keeps what came back of each ask."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from benchmarks.serving.load.client import ServerClient
from benchmarks.serving.load.plan import Ask, Load, Span
from benchmarks.serving.load.records import Record, Run
from benchmarks.serving.load.words import Api, ChatTalk, IdTalk, Talk, words_of
from benchmarks.stores import BenchError

PROGRESS_EVERY_S: Final = 5.0
LAG_EVERY_S: Final = 0.02
_PROBE_WORDS: Final = (64, 320)
_PROBE_SOURCE: Final = 1 << 50

Say = Callable[[str], None]


@dataclass(frozen=True)
class Server:
    """What to load: a base URL and how to speak to it. `model`: empty takes the first one served."""

    url: str
    api: Api = "completions"
    model: str = ""
    api_key: str = ""
    silence_s: float = 120.0


def run_load(
    server: Server,
    load: Load,
    say: Say,
    *,
    concurrency: int = 0,
    lockstep: bool = False,
    tag: str = "",
    watch: Callable[[Record], None] | None = None,
) -> Run:
    """Send it all, in the closed loop at most `concurrency` asks at a time (0: all users at once), with
    `lockstep` each round once the one before is answered. `tag` tells the sessions of several runs apart;
    `watch` sees each record as it comes.
    Raises BenchError where the server cannot be asked at all, or has too short a context.
    """
    return asyncio.run(_Loading(server, load, say, concurrency, lockstep, tag, watch).run())


def check_answers(server: Server) -> None:
    """Whether it can still be asked. Raises BenchError where it cannot."""

    async def check() -> None:
        client = _client(server)
        try:
            await client.model()
        finally:
            await client.aclose()

    asyncio.run(check())


def _client(server: Server) -> ServerClient:
    return ServerClient(
        server.url.rstrip("/"), api_key=server.api_key, api=server.api, silence_s=server.silence_s
    )


class _Loading:
    """One run."""

    def __init__(
        self,
        server: Server,
        load: Load,
        say: Say,
        concurrency: int,
        lockstep: bool,
        tag: str,
        watch: Callable[[Record], None] | None,
    ) -> None:
        self._server = server
        self._load = load
        self._say = say
        self._slots = asyncio.Semaphore(concurrency or len(load.sessions))
        self._lockstep = lockstep
        self._tag = tag or str(load.seed)
        self._watch = watch
        self._records: list[Record] = []
        self._running = 0
        self._lags_s: list[float] = []
        self._words_per_token = 1.0

    async def run(self) -> Run:
        server = self._server
        self._client = _client(server)
        try:
            self._model, context = await self._client.model()
            self._model = server.model or self._model
            if context is not None and self._load.longest_tokens > context:
                raise BenchError(
                    f"the longest prompt with its answer has {self._load.longest_tokens:,} tokens, the "
                    f"server's context {context:,}: take a smaller --scale, fewer rounds, or --max-tokens"
                )
            if server.api == "chat":
                self._words_per_token = await self._measured_words()
            return await self._measured()
        finally:
            await self._client.aclose()

    async def _measured(self) -> Run:
        watching = [asyncio.create_task(self._progress()), asyncio.create_task(self._watch_lag())]
        talks = [self._talk() for _ in self._load.sessions]
        began_at_s, cpu_s = time.time(), time.process_time()
        self._began_s = time.monotonic()
        try:
            if self._lockstep:
                for round_ in range(max(map(len, self._load.sessions))):
                    due = [
                        (talk, asks[round_])
                        for talk, asks in zip(talks, self._load.sessions, strict=True)
                        if round_ < len(asks)
                    ]
                    await asyncio.gather(*(self._ask(talk, ask, time.monotonic()) for talk, ask in due))
            else:
                sessions = zip(talks, self._load.sessions, strict=True)
                await asyncio.gather(*(self._session(talk, asks) for talk, asks in sessions))
        finally:
            for task in watching:
                task.cancel()
            await asyncio.gather(*watching, return_exceptions=True)
        wall_s = time.monotonic() - self._began_s
        records = sorted(self._records, key=lambda record: (record.turn, record.session))
        return Run(
            model=self._model,
            records=records,
            wall_s=wall_s,
            client_cpu=(time.process_time() - cpu_s) / wall_s,
            lags_s=self._lags_s,
            began_at_s=began_at_s,
            open_loop=any(ask.at_s is not None for ask in self._load.asks),
        )

    def _talk(self) -> Talk:
        seed, history = self._load.seed, self._load.keeps_history
        if self._server.api == "chat":
            return ChatTalk(seed, history, self._words_per_token)
        return IdTalk(seed, history)

    async def _session(self, talk: Talk, asks: tuple[Ask, ...]) -> None:
        ready_s = self._began_s
        for ask in asks:
            ready_s = await self._ask(talk, ask, ready_s)

    async def _ask(self, talk: Talk, ask: Ask, ready_s: float) -> float:
        """Send one ask when it is due; when its answer was there. `ready_s`: when the one before was."""
        if ask.at_s is not None:
            planned_s = self._began_s + ask.at_s
            await asyncio.sleep(max(0.0, planned_s - time.monotonic()))
            return await self._send(talk, ask, planned_s, max(planned_s, ready_s))
        async with self._slots:
            now_s = time.monotonic()
            return await self._send(talk, ask, now_s, now_s)

    async def _send(self, talk: Talk, ask: Ask, planned_s: float, due_s: float) -> float:
        """`due_s`: when it could have been sent, had this client no delay of its own."""
        name = f"bench-{self._tag}-{ask.session}"
        body = {**talk.ask(ask), **self._settings(ask.output_tokens)}
        self._running += 1
        heard = await self._client.ask(body, {"x-session-id": name, "x-user-id": name})
        self._running -= 1
        talk.heard(ask, None if heard.error else heard)
        zero_s = self._began_s
        record = Record(
            session=ask.session,
            turn=ask.turn,
            planned_s=planned_s - zero_s,
            due_s=due_s - zero_s,
            sent_s=heard.sent_s - zero_s,
            first_s=None if heard.first_s is None else heard.first_s - zero_s,
            done_s=heard.done_s - zero_s,
            prompt_tokens=heard.prompt_tokens or ask.prompt_tokens,
            output_tokens=heard.output_tokens,
            asked_tokens=ask.output_tokens,
            reusable_tokens=ask.reusable_tokens,
            cached=heard.cached,
            gaps_s=heard.gaps_s,
            error=heard.error,
            detail=heard.detail,
            server_timing=heard.server_timing,
        )
        self._records.append(record)
        if self._watch is not None:
            self._watch(record)
        return heard.done_s

    def _settings(self, output_tokens: int) -> dict[str, Any]:
        return {
            "model": self._model,
            "max_tokens": output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_cached_tokens_details": True,
        }

    async def _measured_words(self) -> float:
        """Words of ours in one token of the server's: two prompts, so that the template does not count."""
        tokens = []
        for count in _PROBE_WORDS:
            text = words_of(self._load.seed, Span(_PROBE_SOURCE, count), 1.0)
            body = {"messages": [{"role": "user", "content": text}], **self._settings(1)}
            heard = await self._client.ask(body, {})
            if heard.error:
                raise BenchError(f"{self._server.url}: {heard.error}: {heard.detail}")
            tokens.append(heard.prompt_tokens)
        if tokens[1] <= tokens[0]:
            raise BenchError(
                f"{self._server.url} does not say how many tokens a prompt has: --api completions"
            )
        return (_PROBE_WORDS[1] - _PROBE_WORDS[0]) / (tokens[1] - tokens[0])

    async def _progress(self) -> None:
        total = len(self._load.asks)
        while True:
            await asyncio.sleep(PROGRESS_EVERY_S)
            failed = sum(bool(record.error) for record in self._records)
            self._say(
                f"{time.monotonic() - self._began_s:5.0f} s: {len(self._records)} of {total} answered, "
                f"{self._running} under way, {failed} failed"
            )

    async def _watch_lag(self) -> None:
        """How late this process comes to what is due."""
        while True:
            due_s = time.monotonic() + LAG_EVERY_S
            await asyncio.sleep(LAG_EVERY_S)
            self._lags_s.append(time.monotonic() - due_s)
