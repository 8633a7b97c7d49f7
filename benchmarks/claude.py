"""Conversations as Claude Code holds them: first token and cached share by turn, with the line that changes
in each request passed on, and taken out of the prompt.

Two clusters are started, and take turns; they differ in the router's `keep_nonces` alone. Each conversation
has rules and files of its own, so its first turn finds nothing.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from contextlib import ExitStack
from statistics import median
from typing import Annotated, Any, Final

import httpx
import msgspec
import typer
from msgspec.structs import replace

from benchmarks.lib.cluster import ExtraArgs, ModelOption, PoolCapacityOption, launched, settings_of
from benchmarks.lib.report import (
    FormatOption,
    OutOption,
    Output,
    Seed,
    Silence,
    Table,
    ms,
    say,
    script,
    times,
)
from tests.support.agents import MESSAGES, claude_code
from tests.support.processes import HarnessError

LINES: Final = {"passed on": True, "taken out": False}
"""What becomes of the line, and the router's `keep_nonces`."""
MAX_TOKENS: Final = 32
DEVICE_TOKENS: Final = 9216  # of each worker: more than a conversation of the demo model's context

WORDS: Final = (
    *("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child"),
    *("world", "school", "state", "family", "student", "group", "country", "problem", "hand", "part"),
    *("place", "case", "week", "company", "system", "program", "question", "work", "government", "number"),
    *("night", "point", "home", "water", "room", "mother", "area", "money", "story", "fact"),
    *("month", "lot", "right", "study", "book", "eye", "job", "word", "business", "issue"),
    *("side", "kind", "head", "house", "service", "friend", "father", "power", "hour", "game"),
    *("line", "end", "member", "law", "car", "city", "community", "name"),
)


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One answered request. `line`: of LINES; `turn` counts from 1; tokens as the client is told."""

    line: str
    conversation: int
    turn: int
    prompt_tokens: int
    cached_tokens: int
    first_token_ms: float


def main(
    model: ModelOption,
    turns: Annotated[int, typer.Option(min=2, help="Turns of each conversation.")] = 5,
    conversations: Annotated[int, typer.Option(min=1, help="Of each cluster; results are medians.")] = 2,
    rules: Annotated[int, typer.Option(min=1, help="Words of the system's prompt.")] = 3000,
    file: Annotated[int, typer.Option(min=1, help="Words of what a tool returns each turn.")] = 40,
    against: Annotated[str, typer.Option(help="The contender that is started twice.")] = "disagg",
    pool_capacity: PoolCapacityOption = "2GiB",
    seed: Seed = 1,
    silence: Silence = 300.0,
    out: OutOption = None,
    format: FormatOption = "text",
    extra: ExtraArgs = None,
) -> None:
    title = f"{conversations} conversations of {turns} turns, {rules} words of rules, {file} a file"
    output = Output(format, load=title, model=model.name, seed=seed, against=against)
    found: list[Turn] = []
    with ExitStack() as stack:
        common = stack.enter_context(
            settings_of(model, DEVICE_TOKENS, extra, out, pool_capacity=pool_capacity)
        )
        urls = {}
        for line, keeps in LINES.items():
            part = line.replace(" ", "-")
            own = replace(
                common,
                directory=common.directory / part,
                memory=common.memory / part,
                tables={"cluster": {"name": part}, "router": {"keep_nonces": keeps}},
            )
            own.memory.mkdir()
            say(f"starting {against}, the line {line}")
            urls[line] = stack.enter_context(launched(against, own)).url
        with httpx.Client(trust_env=False, timeout=silence) as http:
            for line, url in urls.items():  # the first requests of a process are slower
                list(_conversation(http, url, line, -1, 2, _texts(seed, -1, rules, file)))
            for number in range(conversations):
                order = list(urls.items())
                for line, url in order if number % 2 else reversed(order):
                    texts = _texts(seed, number, rules, file)
                    for turn in _conversation(http, url, line, number, turns, texts):
                        found.append(turn)
                        output.row(turn)
                        say(f"conversation {number + 1}, {turn}")
    output.show(table_of(found, f"{title}, {model.name}, {against}"))


def _texts(seed: int, number: int, rules: int, file: int) -> tuple[str, str]:
    """Of one conversation: the rules, and a file."""
    draw = random.Random(f"{seed}-{number}")
    return " ".join(draw.choices(WORDS, k=rules)), " ".join(draw.choices(WORDS, k=file))


def _conversation(
    http: httpx.Client, url: str, line: str, number: int, turns: int, texts: tuple[str, str]
) -> Iterator[Turn]:
    answers: list[str] = []
    name = f"bench-{number}-{time.time_ns()}"
    for turn in range(turns):
        body = {**claude_code(turn, answers, *texts), "max_tokens": MAX_TOKENS, "stream": True}
        body["model"] = http.get(f"{url}/v1/models").json()["data"][0]["id"]
        body["metadata"] = {"user_id": f"user_1_account__session_{name}"}
        first_s, usage, text = _ask(http, url + MESSAGES, body, name)
        cached = usage.get("cache_read_input_tokens") or 0
        computed = usage["input_tokens"] + (usage.get("cache_creation_input_tokens") or 0)
        answers.append(text)
        yield Turn(
            line=line,
            conversation=number,
            turn=turn + 1,
            prompt_tokens=cached + computed,
            cached_tokens=cached,
            first_token_ms=1e3 * first_s,
        )


def _ask(http: httpx.Client, url: str, body: Any, session: str) -> tuple[float, dict[str, Any], str]:
    """When the first of the answer came, in seconds, the usage, and the answer. Raises HarnessError."""
    first_s, usage, texts, begun_s = 0.0, dict[str, Any](), [], time.monotonic()
    headers = {"x-app": "cli", "x-claude-code-session-id": session}
    try:
        with http.stream("POST", url, json=body, headers=headers) as answer:
            if answer.status_code != 200:
                raise HarnessError(f"{url}: {answer.status_code}: {answer.read()[:300]!r}")
            for text in answer.iter_lines():
                event = json.loads(text[5:]) if text.startswith("data:") else {}
                for part in (event.get("message") or {}, event):  # the first event and the last but one
                    usage |= {k: v for k, v in (part.get("usage") or {}).items() if v is not None}
                if event.get("type") == "content_block_delta":
                    first_s = first_s or time.monotonic() - begun_s
                    texts.append(event["delta"].get("text") or event["delta"].get("thinking") or "")
                if event.get("type") == "error":
                    raise HarnessError(f"{url}: {text[:300]}")
    except httpx.HTTPError as error:
        raise HarnessError(f"{url}: {error!r}") from error
    if not first_s:
        raise HarnessError(f"{url}: an answer without text")
    return first_s, usage, "".join(texts)


def table_of(found: list[Turn], title: str) -> Table:
    """A row for each turn: the line passed on, taken out, and how much sooner the first token comes."""
    rows: list[tuple[str, ...]] = []
    for turn in sorted({one.turn for one in found}):
        cells, first = [str(turn)], list[float]()
        for line in LINES:
            its = [one for one in found if (one.turn, one.line) == (turn, line)]
            first.append(median(one.first_token_ms for one in its))
            share = median(one.cached_tokens / one.prompt_tokens for one in its)
            cells += [str(round(median(one.prompt_tokens for one in its))), f"{share:.1%}", ms(first[-1])]
        rows.append((*cells, times(first[0] / first[1])))
    columns = ("turn", *(f"{name}{what}" for name in LINES for what in (": tokens", ", cached", ", ms")))
    return Table(title, (*columns, "sooner"), [*rows])


if __name__ == "__main__":
    script(main, __doc__)
