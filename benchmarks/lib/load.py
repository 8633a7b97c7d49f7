"""A load of conversations on a server of OpenAI's API: which requests are sent, when, and with which text.
Pure but for reading traces.

A session is one user's conversation; its requests come one after the other. A request brings new tokens;
where the session keeps its history, its prompt is everything before it (prompts and answers) followed by
these. Tokens are named by spans: `length` tokens of source number `source`. Equal sources are equal texts, so
prompts share what their spans share. A `Session` makes token ids of spans.

| loop | when a request is sent |
|---|---|
| open | at its planned time, or when the previous answer comes, if that is later; its latency counts from the
  planned time all the same: a server that falls behind cannot slow down the load |
| closed | when the previous answer is there, at most `concurrency` at a time |

In the open loop requests arrive as a Poisson process: the users' first turns in a random order, then all
second turns in another, and so on, at exponential gaps whose mean is exactly 1 / rate.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import numpy as np
from msgspec import Meta
from msgspec.structs import replace

from pdserve.errors import ConfigError

SHARED_SOURCE: Final = 0  # the system prompt of all users


class Span(msgspec.Struct, frozen=True):
    """The first `length` tokens of a source."""

    source: int
    length: int


class Request(msgspec.Struct, frozen=True):
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
    """`sessions[i]`: the requests of session i in order. `keeps_history`: prompts repeat all before them."""

    sessions: tuple[tuple[Request, ...], ...]
    keeps_history: bool
    seed: int

    @property
    def requests(self) -> list[Request]:
        """All of them, in the order they are due."""
        every = [request for session in self.sessions for request in session]
        return sorted(every, key=lambda request: (request.at_s or 0.0, request.turn, request.session))

    @property
    def longest_tokens(self) -> int:
        """The longest prompt with its answer."""
        return max(request.prompt_tokens + request.output_tokens for request in self.requests)


class Shape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
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
    "agents": Shape(  # Mooncake and vLLM: a prompt that all share, one of each agent's own, many short turns
        users=8, rounds=30, system_tokens=20_480, history_tokens=10_240, turn_tokens=2048, output_tokens=900
    ),
    "rounds": Shape(users=80, rounds=10, turn_tokens=2048, output_tokens=16),  # SGLang's bench_multiturn
    "no-reuse": Shape(users=8, rounds=4, turn_tokens=4096, output_tokens=64, keeps_history=False),
}


def shapes_of(texts: Sequence[str]) -> dict[str, Shape]:
    """Loads by title, of `PRESET,scale=0.1,users=4,turn_tokens=32`: a preset, its lengths times `scale`, and
    fields of Shape in place of its own. Raises ConfigError.
    """
    found = {}
    for text in texts:
        name, *settings = text.split(",")
        if name not in PRESETS:
            raise ConfigError(f"--load {text}: '{name}' is no preset: {', '.join(PRESETS)}")
        own: dict[str, float] = {"scale": 1.0}
        for setting in settings:
            key, _, value = setting.partition("=")
            try:
                own[key] = float(value) if key in ("scale", "spread") else int(value)
            except ValueError:
                raise ConfigError(f"--load {text}: '{setting}' is not of the form users=4") from None
        scale = own.pop("scale")
        try:
            shape = msgspec.convert({**msgspec.structs.asdict(PRESETS[name].scaled(scale)), **own}, Shape)
        except msgspec.ValidationError as error:
            raise ConfigError(f"--load {text}: {error}") from None
        more = "".join(f", {key} {value:g}" for key, value in own.items() if key not in ("users", "rounds"))
        found[f"{name}, scale {scale:g}, {shape.users} users, {shape.rounds} rounds{more}"] = shape
    return found


def make_load(shape: Shape, seed: int, rate_s: float | None = None) -> Load:
    """The requests of a shape; `rate_s`: requests per second in the open loop, None is the closed one."""
    rng = np.random.default_rng(seed)
    drawn = _lengths(shape, rng)
    due_s = _arrivals(shape, rng, rate_s)
    sessions = []
    for user in range(shape.users):
        requests: list[Request] = []
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
            requests.append(Request(user, round_ + 1, at_s, tuple(spans), output_tokens, prompt, before))
            before = prompt + output_tokens if shape.keeps_history else 0
        sessions.append(tuple(requests))
    return _with_shared(Load(tuple(sessions), shape.keeps_history, seed), shape.system_tokens)


def total_tokens(load: Load) -> int:
    """What all sessions have at their end: what a cache must hold to miss nothing."""
    return sum(session[-1].prompt_tokens + session[-1].output_tokens for session in load.sessions)


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
    times *= gaps.size / rate_s / times[-1, -1]  # few requests too come at the rate that was asked for
    return [rng.permutation(times[round_]).tolist() for round_ in range(shape.rounds)]


def _source(shape: Shape, user: int, part: int) -> int:
    return 1 + user * (shape.rounds + 1) + part


def _with_shared(load: Load, system_tokens: int) -> Load:
    """What the system prompt adds to `reusable_tokens`: all but the first request find it there."""
    if not system_tokens:
        return load
    first = load.requests[0]

    def shared(request: Request) -> Request:
        finds = request.reusable_tokens < system_tokens and request is not first
        return replace(request, reusable_tokens=system_tokens) if finds else request

    return replace(load, sessions=tuple(tuple(map(shared, session)) for session in load.sessions))


def _scaled(tokens: int, factor: float) -> int:
    return max(1, round(tokens * factor)) if tokens else 0


# --- traces


class TraceLine(msgspec.Struct, frozen=True):
    """A request of a trace in the format of Mooncake's FAST'25 release. Lengths in tokens."""

    timestamp: float  # milliseconds
    hash_ids: list[int]
    input_length: int = 0
    output_length: int = 0


def trace_lines(path: Path) -> list[TraceLine]:
    """A trace: one JSON object a line. Raises ConfigError."""
    found: list[TraceLine] = []
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"--trace {path}: {error.strerror or error}") from error
    for number, text in enumerate(lines, 1):
        try:
            found.append(msgspec.json.decode(text, type=TraceLine))
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ConfigError(f"--trace {path}, line {number}: {error}") from error
    if not found:
        raise ConfigError(f"--trace {path}: it has no lines")
    return found


# --- texts

LOWEST_ID: Final = 300  # bytes and special tokens lie below, in the vocabularies we know
HIGHEST_ID: Final = 4000  # every vocabulary reaches this far
_ANSWERS: Final = 1 << 48  # sources of made-up answers


class Session:
    """One session's conversation, its prompts token ids. An answer's ids are those the server says
    (`return_token_ids`), made up where it says none.
    """

    def __init__(self, seed: int, keeps_history: bool) -> None:
        self._seed = seed
        self._keeps_history = keeps_history
        self._ids: list[int] = []

    def prompt(self, request: Request) -> dict[str, Any]:
        if not self._keeps_history:
            self._ids = []
        for span in request.spans:
            self._ids += ids_of(self._seed, span)
        return {"prompt": [*self._ids], "return_token_ids": True}

    def receive(self, request: Request, said: Sequence[int]) -> None:
        """The answer's ids; without any, one of the planned length is made up, so that the load stays what it
        was planned to be.
        """
        self._ids += said or ids_of(self._seed, _made_up(request))


def ids_of(seed: int, span: Span) -> list[int]:
    """The span's token ids; a shorter span of the same source is a beginning of it."""
    rng = np.random.default_rng((seed, span.source))
    ids: list[int] = rng.integers(LOWEST_ID, HIGHEST_ID, span.length).tolist()
    return ids


def _made_up(request: Request) -> Span:
    return Span(_ANSWERS + request.session * 1_000_000 + request.turn, request.output_tokens)


# --- what came back


class Cached(msgspec.Struct, frozen=True):
    """Prompt tokens found cached: in all, and by place where the server tells (SGLang does)."""

    total: int = 0
    device: int | None = None
    host: int | None = None
    storage: int | None = None


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One request and its answer. Times in s since the run began: `planned_s`, from which its latency counts;
    `due_s`, when the answer before it was there too; `sent_s`; the first token; the end. `asked_tokens`: the
    answer's planned length.
    """

    session: int
    turn: int
    planned_s: float
    due_s: float
    sent_s: float
    first_s: float | None
    done_s: float
    prompt_tokens: int
    output_tokens: int
    asked_tokens: int = 0
    reusable_tokens: int = 0
    cached: Cached = Cached()
    gaps_s: list[float] = []
    error: str = ""
    detail: str = ""
    server_timing: str = ""

    @property
    def first_token_s(self) -> float | None:
        return None if self.first_s is None or self.error else self.first_s - self.planned_s


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """`client_cpu`, and `others_cpu` of processes that the benchmark has not started: of a core; `lags_s`:
    how late the client's event loop came to what was due.
    """

    model: str
    records: list[Record]
    wall_s: float
    client_cpu: float
    others_cpu: float = 0.0
    lags_s: list[float]
