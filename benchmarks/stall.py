"""How long the tokens of a stream wait while another conversation's pages move, in a real worker.

One conversation is streamed. Beside it, others are requested for one token each, and each is of one kind:

| beside | the other conversation is | what the worker does for it |
|---|---|---|
| `alone` | not there | nothing |
| `new` | new | computes it, and writes its pages to the pool |
| `pool` | in the pool only | pulls its pages, and computes the last one |
| `device` | in the device's KV cache, since it was pulled right before | the same, but pulls nothing |

So `pool` over `device` is what pulling costs the stream. What writing costs is `new` over `alone`, beside the
same ratio of plain SGLang, which writes nothing. Rounds take all kinds in this order: a new conversation
drives the others from the device, and a pulled one is there afterwards. Starts an aggregated worker with a
pool node and a router, then plain SGLang.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Annotated, Final, Literal, TypeAlias, get_args

import msgspec
import typer

from benchmarks.lib.client import Response, ServerClient, asked
from benchmarks.lib.cluster import (
    DEMO_MODEL,
    ExtraArgs,
    ModelOption,
    PoolCapacityOption,
    Settings,
    launched,
    settings_of,
)
from benchmarks.lib.load import Span, ids_of
from benchmarks.lib.report import FormatOption, OutOption, Output, Table, fail_with, say, script
from benchmarks.lib.run import Say
from benchmarks.multiturn import Seed, Silence
from tests.support.processes import HarnessError

Beside: TypeAlias = Literal["alone", "new", "pool", "device"]
KINDS: Final[dict[str, tuple[Beside, ...]]] = {"agg": get_args(Beside), "plain": ("alone", "new")}
CONVERSATIONS: Final = 8  # others for in turn: more than device and host hold together
STARTS: Final = (0.2, 0.6)  # of a stream's length: when the others are others
STREAM_PROMPT_TOKENS: Final = 64
STREAM_SOURCE: Final = 1_000_000
FOUND_SHARE: Final = 0.9
"""Of a prompt, so much must be where its kind says; else its stream does not count."""


class StreamSample(msgspec.Struct, frozen=True, kw_only=True):
    """One stream: its gaps, and the first token times of those others beside it."""

    contender: str
    beside: Beside
    gaps_ms: list[float]
    first_token_ms: list[float]


class StallFigures(msgspec.Struct, frozen=True, kw_only=True):
    """All streams of a kind. `..._over_alone`: over the same of the streams alone at the same contender."""

    contender: str
    beside: Beside
    streams: int
    gaps: int
    mean_ms: float
    p50_ms: float
    p99_ms: float
    p99_over_alone: float
    first_token_ms: float | None


class Others(msgspec.Struct):
    """Which conversations are others beside a stream. `turn`: of those that all are in the pool."""

    seed: int
    tokens: int
    turn: Iterator[int] = msgspec.field(default_factory=count)
    fresh: Iterator[int] = msgspec.field(default_factory=lambda: count(CONVERSATIONS))
    last: int = 0

    def prompts(self, beside: Beside) -> list[list[int]]:
        """Those beside one stream."""
        if beside == "alone":
            return []
        sources = [self._source(beside) for _ in STARTS]
        return [ids_of(self.seed, Span(source, self.tokens)) for source in sources]

    def _source(self, beside: Beside) -> int:
        if beside == "new":
            return next(self.fresh)
        if beside == "pool":
            self.last = next(self.turn) % CONVERSATIONS
        return self.last


def figures(samples: Sequence[StreamSample]) -> list[StallFigures]:
    """For each contender and kind. Raises HarnessError where a contender has no stream alone."""
    groups: dict[tuple[str, Beside], list[StreamSample]] = {}
    for one in samples:
        groups.setdefault((one.contender, one.beside), []).append(one)
    found = []
    for (contender, beside), own in groups.items():
        alone = groups.get((contender, "alone"))
        if alone is None:
            raise HarnessError(f"{contender}: no stream alone was answered")
        gaps, first = _gaps(own), [ms for one in own for ms in one.first_token_ms]
        found.append(
            StallFigures(
                contender=contender,
                beside=beside,
                streams=len(own),
                gaps=len(gaps),
                mean_ms=round(statistics.fmean(gaps), 3),
                p50_ms=round(statistics.median(gaps), 3),
                p99_ms=round(_p99(gaps), 3),
                p99_over_alone=round(_p99(gaps) / _p99(_gaps(alone)), 3),
                first_token_ms=round(statistics.median(first), 3) if first else None,
            )
        )
    return found


def _gaps(samples: Sequence[StreamSample]) -> list[float]:
    return [gap for one in samples for gap in one.gaps_ms]


def _p99(values: Sequence[float]) -> float:
    return sorted(values)[int(0.99 * len(values))]


def measure(
    settings: Settings,
    others: Others,
    output_tokens: int,
    rounds: int,
    say: Say,
    silence_s: float,
    keep: Callable[[StreamSample], None],
) -> list[str]:
    """Call `keep` with each sample; what went wrong with streams that do not count. Raises HarnessError."""
    problems: list[str] = []
    for contender, kinds in KINDS.items():
        with launched(contender, settings) as url:
            run = _Run(ServerClient(url, silence_s=silence_s), contender, others, output_tokens)
            problems += asyncio.run(run.measure(kinds, rounds, say, keep))
    return problems


@dataclass
class _Run:
    """Streams of one contender."""

    client: ServerClient
    contender: str
    others: Others
    output_tokens: int
    model: str = ""
    stream_s: float = 0.0  # how long a stream takes alone
    streams: Iterator[int] = field(default_factory=lambda: count(STREAM_SOURCE))

    async def measure(
        self, kinds: Sequence[Beside], rounds: int, say: Say, keep: Callable[[StreamSample], None]
    ) -> list[str]:
        problems = []
        try:
            self.model, _ = await self.client.model()
            if "pool" in kinds:
                for _ in range(CONVERSATIONS // len(STARTS)):
                    for prompt in self.others.prompts("pool"):
                        _answered(await self._request(prompt, 1))
            _answered(await self._stream([])[0])
            for number, beside in itertools.product(range(rounds), kinds):
                which = f"{self.contender}, round {number + 1}, {beside}"
                try:
                    keep(await self._sample(beside))
                    say(f"{which}: done")
                except HarnessError as error:
                    problems.append(f"{which}: {error}")
                    say(problems[-1])
        finally:
            await self.client.aclose()
        return problems

    async def _sample(self, beside: Beside) -> StreamSample:
        """Raises HarnessError where it does not count."""
        prompts = self.others.prompts(beside)
        began_s = time.monotonic()
        stream, *others = await asyncio.gather(*self._stream(prompts))
        if beside == "alone":
            self.stream_s = time.monotonic() - began_s
        for response in (stream, *others):
            _answered(response)
        for response, prompt in zip(others, prompts, strict=True):
            if wrong := _misplaced(beside, response, len(prompt)):
                raise HarnessError(wrong)
        first_s = [one.first_s - one.sent_s for one in others if one.first_s is not None]
        return StreamSample(
            contender=self.contender,
            beside=beside,
            gaps_ms=[round(1e3 * gap, 3) for gap in stream.gaps_s],
            first_token_ms=[round(1e3 * each_s, 3) for each_s in first_s],
        )

    def _stream(self, prompts: Sequence[list[int]]) -> list[asyncio.Task[Response]]:
        """The stream, and those others beside it at their times."""
        own = ids_of(self.others.seed, Span(next(self.streams), STREAM_PROMPT_TOKENS))
        tasks = [asyncio.create_task(self._request(own, self.output_tokens))]
        for prompt, start in zip(prompts, STARTS, strict=False):
            tasks.append(asyncio.create_task(self._request(prompt, 1, start * self.stream_s)))
        return tasks

    async def _request(self, prompt: list[int], output_tokens: int, after_s: float = 0.0) -> Response:
        await asyncio.sleep(after_s)
        return await self.client.request({"prompt": prompt, **asked(self.model, output_tokens)}, {})


def _answered(response: Response) -> None:
    if response.error:
        raise HarnessError(f"not answered: {response.error} {response.detail}".strip())


def _misplaced(beside: Beside, response: Response, tokens: int) -> str:
    """Why what was found of a prompt is not where its kind says; empty: it is."""
    cached = response.cached
    found = {"device": cached.device, "pool": cached.storage}.get(beside)
    if beside == "new":
        return f"{cached.total} tokens of a new prompt were cached" if cached.total else ""
    if (found or 0) >= FOUND_SHARE * tokens:
        return ""
    return (
        f"{found} of {tokens} tokens came from the {beside} (device {cached.device}, host {cached.host}, "
        f"storage {cached.storage})"
    )


def main(
    tokens: Annotated[
        int, typer.Option(min=256, help="Tokens of each conversation requested beside.")
    ] = 8000,
    output_tokens: Annotated[int, typer.Option(min=100, help="Tokens of each stream.")] = 400,
    rounds: Annotated[int, typer.Option(min=1, help="Streams of each kind.")] = 5,
    model: ModelOption = DEMO_MODEL,
    pool_capacity: PoolCapacityOption = "4GiB",
    seed: Seed = 1,
    silence: Silence = 300.0,
    out: OutOption = None,
    format: FormatOption = "text",
    extra: ExtraArgs = None,
) -> None:
    title = f"Streams of {output_tokens} tokens beside conversations of {tokens:,}, {model.name}"
    output = Output(format, load=title, seed=seed)
    room = -(-int(1.1 * (tokens + 3 * output_tokens)) // 64) * 64 + 64  # with the last stream and this one
    samples: list[StreamSample] = []

    def keep(sample: StreamSample) -> None:
        samples.append(sample)
        output.row(sample)

    with settings_of(model, room, extra, out, pool_capacity=pool_capacity) as settings:
        problems = measure(settings, Others(seed, tokens), output_tokens, rounds, say, silence, keep)
    found = figures(samples)
    for line in found:
        output.row(line)
    columns = (
        "server",
        "beside",
        "streams",
        "gaps",
        "mean, ms",
        "p50",
        "p99",
        "p99 / alone",
        "first token, ms",
    )
    rows = [
        (
            *(one.contender, one.beside, f"{one.streams}", f"{one.gaps:,}", f"{one.mean_ms:.1f}"),
            *(f"{one.p50_ms:.1f}", f"{one.p99_ms:.1f}", f"{one.p99_over_alone:.2f}"),
            "" if one.first_token_ms is None else f"{one.first_token_ms:.0f}",
        )
        for one in found
    ]
    output.show(Table(title, columns, rows, left=("server", "beside")))
    fail_with(problems)


if __name__ == "__main__":
    script(main, __doc__)
