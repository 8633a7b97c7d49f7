"""Who sends what, and when: a load as a pure function of its shape and a seed.

A session is one user's conversation; its asks come one after the other. An ask brings new tokens, and where
the session keeps its history the prompt is all before it (prompts and answers) and these. Tokens are named by
spans, `length` tokens of source number `source`: equal sources are equal texts, so what two prompts share is
what their spans share. `words.py` makes tokens or words of them.

| loop | when an ask is sent |
|---|---|
| open | at its planned time; if the answer before it comes later, then, and its latency counts from the
  planned time all the same: a server that falls behind cannot slow down its own questioning |
| closed | when the answer before it is there, at most `concurrency` at a time |

In the open loop asks arrive like a Poisson process: the users' first turns in a random order, then all second
turns in another, and so on, at exponential gaps whose mean is 1 / rate exactly.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Final

import msgspec
import numpy as np
from msgspec import Meta
from msgspec.structs import replace

BLOCK_TOKENS: Final = 512  # of a request trace
SHARED_SOURCE: Final = 0  # the system prompt of all users
_TRACE_SOURCES: Final = 1 << 32  # blocks of a trace: far from the sources of sessions


class Span(msgspec.Struct, frozen=True):
    """The first `length` tokens of a source."""

    source: int
    length: int


class Ask(msgspec.Struct, frozen=True):
    """One request. `turn` counts from 1; `at_s` is None in the closed loop. `reusable_tokens`: what a cache
    that forgets nothing would have of the prompt.
    """

    session: int
    turn: int
    at_s: float | None
    spans: tuple[Span, ...]
    output_tokens: int
    prompt_tokens: int
    reusable_tokens: int = 0


class Load(msgspec.Struct, frozen=True):
    """`sessions[i]`: the asks of session i in order. `keeps_history`: prompts repeat all before them."""

    sessions: tuple[tuple[Ask, ...], ...]
    keeps_history: bool
    seed: int

    @property
    def asks(self) -> list[Ask]:
        """All of them, in the order they are due."""
        every = [ask for session in self.sessions for ask in session]
        return sorted(every, key=lambda ask: (ask.at_s or 0.0, ask.turn, ask.session))

    @property
    def longest_tokens(self) -> int:
        """The longest prompt with its answer."""
        return max(ask.prompt_tokens + ask.output_tokens for ask in self.asks)


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """A load of conversations. All lengths in tokens."""

    users: Annotated[int, Meta(ge=1)]
    rounds: Annotated[int, Meta(ge=1)]
    system_tokens: Annotated[int, Meta(ge=0)] = 0
    """One system prompt that all users share."""
    history_tokens: Annotated[int, Meta(ge=0)] = 0
    """What a user's first turn brings besides: a document, a past."""
    turn_tokens: Annotated[int, Meta(ge=1)]
    """New in every turn."""
    output_tokens: Annotated[int, Meta(ge=1)]
    keeps_history: bool = True
    spread: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    """Each length but the system prompt's is drawn from 1 - spread to 1 + spread times what is given."""

    def scaled(self, factor: float) -> Shape:
        """All lengths times `factor`, at least one token where there was one."""
        names = ("system_tokens", "history_tokens", "turn_tokens", "output_tokens")
        return replace(self, **{name: _scaled(getattr(self, name), factor) for name in names})


PRESETS: Final[dict[str, Shape]] = {
    "eic": Shape(users=8, rounds=5, turn_tokens=8192, output_tokens=200),
    "long-input-short-output": Shape(
        users=15, rounds=20, system_tokens=1000, history_tokens=20_000, turn_tokens=32, output_tokens=100
    ),
    "shared-prefix": Shape(users=32, rounds=1, system_tokens=4096, turn_tokens=128, output_tokens=64),
    "no-reuse": Shape(users=8, rounds=4, turn_tokens=4096, output_tokens=64, keeps_history=False),
}


def make_load(shape: Shape, seed: int, rate_s: float | None = None) -> Load:
    """The asks of a shape; `rate_s`: asks per second in the open loop, None is the closed one."""
    rng = np.random.default_rng(seed)
    drawn = _lengths(shape, rng)
    due_s = _arrivals(shape, rng, rate_s)
    sessions = []
    for user in range(shape.users):
        asks: list[Ask] = []
        before = 0  # tokens of the conversation so far, the last answer included
        for round_ in range(shape.rounds):
            turn_tokens, output_tokens = drawn[user][round_]
            spans = []
            if round_ == 0 or not shape.keeps_history:
                spans.append(Span(SHARED_SOURCE, shape.system_tokens))
            if round_ == 0:
                spans.append(Span(_source(shape, user, 0), _history(shape, drawn[user])))
            spans.append(Span(_source(shape, user, round_ + 1), turn_tokens))
            spans = [span for span in spans if span.length]
            prompt = before + sum(span.length for span in spans)
            at_s = None if due_s is None else due_s[round_][user]
            asks.append(Ask(user, round_ + 1, at_s, tuple(spans), output_tokens, prompt, before))
            before = prompt + output_tokens if shape.keeps_history else 0
        sessions.append(tuple(asks))
    return _with_shared(Load(tuple(sessions), shape.keeps_history, seed), shape.system_tokens)


def total_tokens(load: Load) -> int:
    """What all sessions have at their end: what a cache must hold to miss nothing."""
    return sum(session[-1].prompt_tokens + session[-1].output_tokens for session in load.sessions)


def first_turn_tokens(load: Load) -> int:
    """What all sessions have after their first turn; a smaller cache has lost each when it comes again."""
    return sum(session[0].prompt_tokens + session[0].output_tokens for session in load.sessions)


def replay_load(
    requests: Iterable[tuple[float, int, int, Sequence[int]]], *, scale: float, speed: float, seed: int
) -> Load:
    """The asks of a trace: (seconds, input length, output length, ids of blocks of 512 tokens), lengths times
    `scale`, time divided by `speed`. Each is a session of its own: a trace repeats history by its blocks.
    """
    block = _scaled(BLOCK_TOKENS, scale)
    seen: set[int] = set()
    sessions = []
    for number, (at_s, input_length, output_length, blocks) in enumerate(requests):
        left, spans, reusable, known = _scaled(input_length, scale), [], 0, True
        for id_ in blocks:
            if left <= 0:
                break
            spans.append(Span(_TRACE_SOURCES + id_, min(block, left)))
            known = known and id_ in seen
            reusable += spans[-1].length if known else 0
            left -= block
        seen.update(blocks)
        prompt = sum(span.length for span in spans)
        output = max(1, _scaled(output_length, scale))
        sessions.append((Ask(number, 1, at_s / speed, tuple(spans), output, prompt, reusable),))
    return Load(tuple(sessions), False, seed)


def _lengths(shape: Shape, rng: np.random.Generator) -> list[list[tuple[int, int]]]:
    """(new tokens, answer) by user and round."""
    factors = rng.uniform(1 - shape.spread, 1 + shape.spread, (shape.users, shape.rounds, 2))
    given = np.array([shape.turn_tokens, shape.output_tokens])
    lengths = np.maximum(1, np.rint(factors * given)).astype(int).tolist()
    return [[(turn, output) for turn, output in rounds] for rounds in lengths]


def _history(shape: Shape, drawn: Sequence[tuple[int, int]]) -> int:
    """A user's history varies as its first turn does."""
    return round(shape.history_tokens * drawn[0][0] / shape.turn_tokens) if shape.history_tokens else 0


def _arrivals(shape: Shape, rng: np.random.Generator, rate_s: float | None) -> list[list[float]] | None:
    """When, by round and user."""
    if rate_s is None:
        return None
    gaps = rng.exponential(1 / rate_s, (shape.rounds, shape.users))
    times = np.cumsum(gaps).reshape(gaps.shape)
    times *= gaps.size / rate_s / times[-1, -1]  # few asks too come at the rate that was asked for
    return [rng.permutation(times[round_]).tolist() for round_ in range(shape.rounds)]


def _source(shape: Shape, user: int, part: int) -> int:
    return 1 + user * (shape.rounds + 1) + part


def _with_shared(load: Load, system_tokens: int) -> Load:
    """What the system prompt adds to `reusable_tokens`: all but the first ask find it there."""
    if not system_tokens:
        return load
    first = load.asks[0]

    def shared(ask: Ask) -> Ask:
        finds = ask.reusable_tokens < system_tokens and ask is not first
        return replace(ask, reusable_tokens=system_tokens) if finds else ask

    return replace(load, sessions=tuple(tuple(map(shared, session)) for session in load.sessions))


def _scaled(tokens: int, factor: float) -> int:
    return max(1, round(tokens * factor)) if tokens else 0
