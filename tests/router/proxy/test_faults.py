"""Every fault in every phase of every kind of answer, against one oracle.

`expected` states what the client must see, what the router counts, whom it blames and whom it asks. A case is
played before scripted workers, and everything that was seen is compared at once. No case waits for a real
deadline: a worker that stalls is held at a gate, and the wait that then runs is made to expire.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal
from unittest.mock import patch

import pytest

from pdserve.router.config.limits import Deadlines, Probe
from pdserve.router.http.worker_connection import WorkerConnection
from pdserve.router.request.request import Request
from tests.support.router.harness import Connection, Harness, chat_body, disagg
from tests.support.router.mock_worker import (
    ANSWER,
    DONE,
    EVENTS,
    REPORT,
    STREAM,
    CloseConnection,
    Gate,
    MockWorker,
    Received,
    Script,
    Wire,
    answer,
    answered_with,
    close,
    hang,
    raw_answer,
    stream,
)
from tests.support.router.streams import FIRST, REST, SENT, WHOLE, marked, named

CHAT, PREFILL, SETTLED = "/v1/chat/completions", "/pd/prefill", "/pd/settled"
PULL, CONTINUE = "/pd/pull", "/pd/continue"

Kind = Literal["whole", "plain", "sampled", "greedy"]
"""A JSON answer; a stream without marks; a marked stream that is not, and one that is, determined."""
Phase = Literal["settle", "prefill", "pull", "decode", "stream", "resume"]
Others = Literal["none", "well", "failing", "unpaid"]
"""No second decode worker; one that works; one with the same fault; one, but no budget for a retry."""

KINDS: tuple[Kind, ...] = ("whole", "plain", "sampled", "greedy")
ASKED: dict[Kind, dict[str, Any]] = {
    "whole": {},
    "plain": {"stream": True, "temperature": 0},
    "sampled": {"stream": True, "temperature": 1},
    "greedy": {"stream": True, "temperature": 0},
}
SAID: dict[Kind, bytes] = {"whole": ANSWER, "plain": STREAM, "sampled": WHOLE, "greedy": WHOLE}
MARKED = marked(*FIRST, b": pd 5 3 10\n\n", named("one", "", "stop") + DONE)
WELL: dict[Kind, Script] = {
    "whole": answered_with(""),
    "plain": stream(EVENTS),
    "sampled": MARKED,
    "greedy": MARKED,
}
LEFT_S: dict[Phase, float] = {"settle": 1000, "prefill": 2000, "decode": 3000, "stream": 4000, "resume": 4000}
"""What a stalled worker is given, by phase: far apart, so that a wrong deadline shows."""
WHOLE_S = 6000.0
"""The same in the decode phase of an answer that is no stream."""
DEADLINES = Deadlines(
    wait_for_worker_s=0.0,
    settle_s=LEFT_S["settle"],
    prefill_s=LEFT_S["prefill"],
    first_byte_s=LEFT_S["decode"],
    whole_answer_s=WHOLE_S,
    between_chunks_s=LEFT_S["stream"],
    total_s=9000.0,
)
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\n%b\r\n"
STREAMED = HEAD % (b"text/event-stream", b"transfer-encoding: chunked\r\n")
NESTED = b'{"x":' + b"[" * 99_994


def json_of(length: int, body: bytes) -> bytes:
    return HEAD % (b"application/json", b"content-length: %d\r\n" % length) + body


@dataclass(frozen=True)
class Fault:
    """What the worker does, and the router's word for it."""

    name: str
    word: str
    script: Script | None = None
    """None: the worker is stopped, or held."""


def status(code: int) -> Fault:
    return Fault(
        f"status {code}", f"status-{code}", answer(code, {"object": "error", "message": f"no {code}"})
    )


STOPPED = Fault("stopped", "connect")
STALLED = Fault("stalled", "timeout")
CUT = Fault("cut", "cut")
NO_HEAD = (
    Fault("closed", "closed", close()),
    Fault("half a head", "closed", close(after=b"HTTP/1.1 20")),
    Fault("no HTTP", "protocol", raw_answer(b"SSH-2.0-OpenSSH_9.2\r\n\r\n")),
)
BROKEN = (
    *NO_HEAD,
    Fault("half a body", "cut", close(after=json_of(900, b"{"))),
    Fault("half a stream", "cut", close(after=STREAMED)),
    Fault(
        "half an event", "cut", close(after=HEAD % (b"text/event-stream", b"content-length: 99\r\n") + b"d")
    ),
    Fault("a stream before its first mark", "cut", marked(FIRST[2], cut=True)),
    STOPPED,
    STALLED,
)
GARBAGE = tuple(
    Fault(f"garbage {body[:9]!r}", "garbage", raw_answer(json_of(len(body), body)))
    for body in (b"x", b"{}", b"\xff\xfe??", b'{"cached":{"\xff":1}}', NESTED)
)
REPORT_JSON = json.dumps(REPORT).encode()
SETTLED_SAID = {"known": True, "settled": True}
FAULTS: dict[Phase, tuple[Fault, ...]] = {
    "settle": (
        *(fault for fault in BROKEN if fault is not STOPPED),
        *GARBAGE,
        *map(status, (400, 404, 500, 503)),
        Fault("settled", "settled", answer(200, SETTLED_SAID)),
        Fault("unknown", "unknown", answer(200, SETTLED_SAID | {"known": False})),
        Fault("unsettled", "unsettled", answer(200, SETTLED_SAID | {"settled": False})),
    ),
    "prefill": (*BROKEN, *GARBAGE, *map(status, (400, 404, 413, 422, 429, 500, 502, 503, 504))),
    "pull": (*NO_HEAD, *map(status, (404, 503)), Fault("pulled", "ok", answer(200, {"pulled_tokens": 0}))),
    "decode": (*BROKEN, *map(status, (400, 404, 413, 422, 429, 500, 502, 503, 504))),
    "stream": (CUT, Fault("no chunk", "protocol"), STALLED),
    "resume": (
        *NO_HEAD,
        Fault("half a stream", "cut", close(after=STREAMED)),
        Fault("JSON", "protocol", answer(200, {"choices": []})),
        *map(status, (400, 500, 503)),
        STOPPED,
        STALLED,
    ),
}


@dataclass(frozen=True)
class Case:
    phase: Phase
    fault: Fault
    kind: Kind
    others: Others = "none"

    def __str__(self) -> str:
        return f"{self.fault.name} in {self.phase} of {self.kind}, other workers: {self.others}"


@dataclass
class Seen:
    """What the client got, what the router counted, whom it blamed and whom it asked."""

    status: int = 200
    body: bytes = b""
    """Without the error at its end."""
    error: str | None = None
    """The error's code, or a worker's own message: in the answer, or in the event that ends the stream."""
    words: tuple[str, ...] = ()
    """Of the plan, after the choices of workers."""
    answered_by: str | None = None
    """The decode worker that the answer names: first, second."""
    counted: dict[str, dict[str, int]] = field(default_factory=dict)
    blamed: dict[str, int] = field(default_factory=dict)
    """Failures counted against a worker's circuit."""
    asked: dict[str, list[str]] = field(default_factory=dict)
    """Worker → paths."""


def expected(case: Case) -> Seen:
    """The oracle."""
    word, phase = case.fault.word, case.phase
    if phase in ("settle", "pull"):
        return beside(case)
    if phase == "prefill":
        return prefilling(case)
    code = code_of(word)
    first_word = "cut" if phase == "resume" else word
    if phase == "decode":
        lost = Seen(status=code or {"timeout": 504}.get(word, 502), words=("stage=ok",))
        lost.error = f"no {code}" if code else "worker_unavailable"
        lost.answered_by = "first" if is_final(code) else None
        is_retried = case.others in ("well", "failing") and not is_final(code) and word != "timeout"
        is_paid = case.others != "unpaid" or is_final(code) or word == "timeout"
        counter, path = "decode_retries", CHAT
    else:
        lost = Seen(
            body=EVENTS[0] if case.kind == "plain" else SENT, error="worker_lost", words=("stage=ok",)
        )
        lost.answered_by = "first"
        is_retried = case.others in ("well", "failing") and case.kind == "greedy"
        is_paid = case.others != "unpaid" or case.kind != "greedy"
        counter, path = "continued", CONTINUE
    seen = lost
    if is_retried and case.others == "well":
        seen = Seen(body=SAID[case.kind], words=lost.words, answered_by=lost.answered_by or "second")
    if is_retried and phase == "decode":
        seen.words = ("stage=ok", "retried")
    seen.counted = {"prefill": {"ok": 1}}
    if is_retried:
        seen.counted[counter] = {first_word: 1}
    if not is_paid:
        seen.counted["retries_refused"] = {"": 1}
    if seen.error == "worker_lost":
        seen.counted["stream_errors"] = {word if is_retried else first_word: 1}
    seen.asked = {"prefill": [PREFILL]}
    if word != "connect" or phase == "resume":
        seen.asked["first"] = [CHAT]
    if is_retried and (word != "connect" or case.others == "well"):
        seen.asked["second"] = [path]
    is_long = phase == "decode" and case.kind == "whole" and word == "timeout"
    is_proven = code_of(word) == 500 and is_retried and case.others == "well"
    if (is_blamed(first_word) and not is_long) or is_proven:
        seen.blamed["first"] = 1
    if is_retried and case.others == "failing" and is_blamed(word):
        seen.blamed["second"] = 1
    return seen


def beside(case: Case) -> Seen:
    """Settling, and pulling ahead: whatever becomes of it, the call goes on as if nothing had happened."""
    word = case.fault.word
    seen = Seen(body=SAID[case.kind], words=("stage=ok",), answered_by="first")
    seen.counted = {"prefill": {"ok": 1}, {"settle": "settle", "pull": "pull_ahead"}[case.phase]: {word: 1}}
    seen.asked = {
        "prefill": [PREFILL],
        "first": sorted((CHAT, {"settle": SETTLED, "pull": PULL}[case.phase])),
    }
    if case.phase == "settle":
        seen.words = (f"settle={word}", "stage=ok")
    return seen


def prefilling(case: Case) -> Seen:
    """The request's own fault is final; after anything else the decode worker computes the prompt."""
    word = case.fault.word
    code = code_of(word)
    asked = {} if word == "connect" else {"prefill": [PREFILL]}
    if code in (400, 413, 422):
        final = Seen(status=code, error=f"no {code}", asked=asked)
        final.counted = {"prefill": {"client-error": 1}}
        return final
    seen = Seen(body=SAID[case.kind], words=(f"stage={word}",), answered_by="first")
    seen.counted = {"prefill": {word: 1}}
    seen.blamed = {"prefill": 1} if is_blamed(word) or code == 500 else {}
    seen.asked = asked | {"first": [CHAT]}
    return seen


def code_of(word: str) -> int:
    return int(word.removeprefix("status-")) if word.startswith("status-") else 0


def is_final(code: int) -> bool:
    """A decode worker's answer that is passed on, since another worker would say the same."""
    return 400 <= code < 500


def is_blamed(word: str) -> bool:
    """Counted against the worker's circuit at once: not what may be the request's doing."""
    return code_of(word) in (0, 502, 503, 504)


# --- playing a case


def broken_off(kind: Kind, fault: Fault, gate: Gate) -> Script:
    """A stream that begins well."""

    async def script(wire: Wire, request: Received) -> None:
        is_marked = kind != "plain"
        await wire.head(200, "text/event-stream", extra="x-pdserve-marks: 1\r\n" if is_marked else "")
        for piece in FIRST if is_marked else (EVENTS[0], EVENTS[1][:20]):
            await wire.chunk(piece)
        if fault is STALLED:
            await gate.passed()
        if fault.word == "protocol":
            await wire.raw(b"no chunk\r\n")
        raise CloseConnection

    return script


COUNTERS = (
    "prefill",
    "settle",
    "pull_ahead",
    "decode_retries",
    "continued",
    "stream_errors",
    "client_aborts",
)


class Stage:
    """A router before its workers, one case after another."""

    def __init__(self, harness: Harness, prefill: MockWorker, first: MockWorker, *second: MockWorker) -> None:
        self.harness = harness
        self.workers = dict(zip(("prefill", "first", "second"), (prefill, first, *second), strict=False))
        self.cases = 0

    def reset(self) -> None:
        """Forget the case before. The first decode worker is the least loaded one."""
        fleet, stats = self.harness.router.fleet, self.harness.stats
        for name, worker in self.workers.items():
            worker.scripts.clear()
            worker.requests.clear()
            worker.disconnected = 0
            known = fleet.by_id[worker.id]
            fleet.on_success(known)
            for _ in range(2):  # so the connections that it lost were no death
                fleet.on_probe_ready(known)
            known.elsewhere = 100 if name == "second" else 0
        for counter in COUNTERS:
            getattr(stats, counter).clear()
        stats.retries_refused = 0

    async def expire(self, kind: type, left_s: float | None = None) -> None:
        """Once something of this type waits for about `left_s` more, let that time pass."""
        loop = asyncio.get_running_loop()

        def waiting() -> list[Any]:
            upstream = self.harness.router.upstream
            watched = (*upstream.deadlines.watched, *upstream.exchanges())
            return [one for one in watched if isinstance(one, kind) and one.deadline_s < loop.time() + 90_000]

        await self.harness.until(lambda: bool(waiting()))
        for one in waiting():
            assert left_s is None or left_s - 500 < one.deadline_s - loop.time() <= left_s + 1
            setattr(one, "total_s" if kind is Request else "deadline_s", 0.0)

    async def play(self, case: Case) -> Seen:
        """Play it, and say what was seen."""
        self.cases += 1
        session = {"x-session-id": f"s{self.cases}"} if case.phase == "settle" else {}
        if session:
            await self.harness.chat(headers=session)
        self.reset()
        gate = Gate()
        self.write_scripts(case, gate)
        stopped = self.stopped(case)
        for worker in stopped:
            await worker.stop()
        more = ASKED[case.kind]
        if case.phase == "pull":
            more = more | {"messages": [{"role": "user", "content": "word " * 1000}]}
        seen, client = Seen(), await self.harness.connect()
        await client.send(CHAT, json.dumps(chat_body(**more)).encode(), session)
        if case.fault is STALLED:
            await gate.reached.wait()
            if case.phase in ("stream", "resume"):
                await take(client, seen, until=expected(replace(case, others="none")).body)
            is_whole = case.phase == "decode" and case.kind == "whole"
            await self.expire(WorkerConnection, WHOLE_S if is_whole else LEFT_S[case.phase])
        if case.phase == "pull":
            await self.harness.until(lambda: bool(self.harness.stats.pull_ahead))
            gate.open.set()
        await take(client, seen)
        client.leave()
        await self.harness.assert_nothing_leaked()
        self.note(seen)
        for worker in stopped:
            await worker.start(worker.port)
        return seen

    def stopped(self, case: Case) -> list[MockWorker]:
        if case.fault is not STOPPED:
            return []
        names = {"prefill": ["prefill"], "decode": ["first"], "resume": ["second"]}[case.phase]
        names += ["second"] if case.phase == "decode" and case.others == "failing" else []
        return [self.workers[name] for name in names]

    def write_scripts(self, case: Case, gate: Gate) -> None:
        first, script = self.workers["first"], case.fault.script or hang(gate)
        at_first = {"settle": SETTLED, "pull": PULL, "decode": CHAT}
        if case.phase in at_first:
            first.script(at_first[case.phase], script)
            if case.phase == "pull":  # computed when the pull has ended
                self.workers["prefill"].script(PREFILL, stream([REPORT_JSON], gate, gate_after=0))
        elif case.phase == "prefill":
            self.workers["prefill"].script(PREFILL, script)
        else:
            fault = CUT if case.phase == "resume" else case.fault
            first.script(CHAT, broken_off(case.kind, fault, gate))
        first.script(CHAT, WELL[case.kind])
        if second := self.workers.get("second"):
            rest = script if case.others == "failing" else marked(*REST)
            second.script(CONTINUE, rest)
            second.script(CHAT, script if case.others == "failing" else WELL[case.kind])

    def note(self, seen: Seen) -> None:
        stats, by_id = self.harness.stats, self.harness.router.fleet.by_id
        seen.counted = {name: dict(getattr(stats, name)) for name in COUNTERS if getattr(stats, name)}
        if stats.retries_refused:
            seen.counted["retries_refused"] = {"": stats.retries_refused}
        failures = {name: by_id[worker.id].circuit.failures for name, worker in self.workers.items()}
        seen.blamed = {name: count for name, count in failures.items() if count}
        paths = {name: sorted(r.path for r in worker.requests) for name, worker in self.workers.items()}
        seen.asked = {name: asked for name, asked in paths.items() if asked}
        if seen.answered_by is not None:
            [seen.answered_by] = [n for n, worker in self.workers.items() if worker.id == seen.answered_by]


async def take(client: Connection, seen: Seen, until: bytes | None = None) -> None:
    """Read what the client gets: to the end, or `until` so much of the body is there."""
    if not seen.body:
        head = await client.head()
        seen.status, seen.answered_by = head.status, head.headers.get("x-pdserve-decode")
        plan = head.headers.get("x-pdserve-plan", "").split(", ")
        seen.words = tuple(word for word in plan if word and not word.startswith(("decode=", "prefill=")))
        if "content-length" in head.headers:
            seen.body = await client.reader.readexactly(int(head.headers["content-length"]))
            if seen.status != 200:
                error = json.loads(seen.body)["error"]
                seen.body, seen.error = b"", error["code"] or error["message"]
            return
    while until is None or len(seen.body) < len(until):
        data = await client.chunk()
        if not data:
            break
        seen.body += data
    at = seen.body.find(b'data: {"error":')
    if at >= 0:
        seen.error = json.loads(seen.body[at + 6 :])["error"]["code"]
        seen.body = seen.body[:at]


@asynccontextmanager
async def stage(decode: int = 1, *, is_paid: bool = True, **config: Any) -> AsyncIterator[Stage]:
    """`is_paid`: retries have a budget."""
    settings = {
        "deadlines": DEADLINES,
        "probe": Probe(interval_s=3600.0, circuit_failures=1000),
        "decode_policy": "least_loaded",
    } | config
    ratio, per_s = (0.2, 1000.0) if is_paid else (0.0, 0.0)
    with (
        patch("pdserve.router.http.worker_connection.IDLE_S", 0.0),  # a used connection is replaced once
        patch("pdserve.router.proxy.failures.RATIO", ratio),
        patch("pdserve.router.proxy.failures.MIN_PER_S", per_s),
    ):
        async with disagg(decode=decode, **settings) as (harness, (prefill,), decodes):
            harness.router.fleet.on_doubt = None  # the stage alone says what probes find
            yield Stage(harness, prefill, *decodes)


TABLES: dict[str, tuple[Phase, Others, tuple[Kind, ...]]] = {
    "settle": ("settle", "none", ("whole", "greedy")),
    "prefill": ("prefill", "none", ("whole", "greedy")),
    "pull": ("pull", "none", ("whole",)),
    "decode": ("decode", "none", KINDS),
    "decode, another is well": ("decode", "well", KINDS),
    "decode, both fail": ("decode", "failing", KINDS),
    "decode, no budget": ("decode", "unpaid", ("whole", "greedy")),
    "stream": ("stream", "none", KINDS[1:]),
    "stream, another is well": ("stream", "well", KINDS[1:]),
    "stream, no budget": ("stream", "unpaid", KINDS[1:]),
    "resume": ("resume", "failing", ("greedy",)),
}


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.timeout(120)
async def test_every_fault_has_the_outcome_of_the_oracle(table: str) -> None:
    phase, others, kinds = TABLES[table]
    config: dict[str, Any] = {"pull_ahead_tokens": 500} if phase == "pull" else {}
    config["is_paid"] = others != "unpaid"
    async with stage(1 if others == "none" else 2, **config) as played:
        for kind in kinds:
            for fault in FAULTS[phase]:
                case = Case(phase, fault, kind, others)
                assert await played.play(case) == expected(case), str(case)


# --- the end from outside

HELD: dict[str, tuple[str, str]] = {
    "settle": ("first", SETTLED),
    "prefill": ("prefill", PREFILL),
    "pull": ("first", PULL),
    "decode": ("first", CHAT),
    "first byte": ("first", CHAT),
    "stream": ("first", CHAT),
    "resume": ("second", CONTINUE),
}
"""Where a call is held: the worker, and what it is asked."""
COUNTED_AS = {"pull": "prefill", "first byte": "decode", "resume": "stream"}


def held(phase: str, gate: Gate) -> Script:
    if phase in ("first byte", "stream"):
        return stream(EVENTS, gate, gate_after=0 if phase == "first byte" else 1)
    return marked(REST[0], gate=gate) if phase == "resume" else hang(gate)


@pytest.mark.parametrize("end", ["client", "deadline"])
@pytest.mark.parametrize("phase", HELD)
async def test_a_call_can_end_in_any_phase_and_leaves_nothing(phase: str, end: str) -> None:
    """The client leaves, or the total time is up: every request to a worker is cut, and no other is made."""
    ahead = {"pull_ahead_tokens": 1 if phase == "pull" else 0}
    async with stage(2 if phase == "resume" else 1, **ahead) as played:
        harness, (name, path) = played.harness, HELD[phase]
        gate, session = Gate(), {"x-session-id": "s"}
        if phase == "settle":
            await harness.chat(headers=session)
        played.reset()
        if phase == "resume":
            played.workers["first"].script(CHAT, marked(*FIRST, cut=True))
        if phase == "pull":
            played.workers["prefill"].script(PREFILL, hang())
        worker = played.workers[name]
        worker.script(path, held(phase, gate))
        client, seen = await harness.connect(), Seen()
        asked = chat_body(stream=True, temperature=0)
        await client.send(CHAT, json.dumps(asked).encode(), session if phase == "settle" else {})
        await gate.reached.wait()
        is_started = phase in ("stream", "resume")
        if is_started:
            await take(client, seen, until=EVENTS[0] if phase == "stream" else SENT)
        if end == "deadline":
            await played.expire(Request)
            await take(client, seen)
            assert (seen.status, seen.error) == (200 if is_started else 504, "deadline_exceeded")
        client.leave()
        await worker.wait_until(lambda: worker.disconnected == 1)
        await harness.assert_nothing_leaked()
        await harness.until(lambda: phase != "pull" or bool(harness.stats.pull_ahead))
        played.note(seen)
        assert seen.blamed == ({"first": 1} if phase == "resume" else {})
        assert seen.counted.get("decode_retries") is None
        aborts = {COUNTED_AS.get(phase, phase): 1} if end == "client" else None
        assert seen.counted.get("client_aborts") == aborts
        broken = {"deadline_exceeded": 1} if end == "deadline" and is_started else None
        assert seen.counted.get("stream_errors") == broken
        later = {CHAT} if phase in ("settle", "prefill", "pull") else set()
        assert not later & set(seen.asked.get("first", ()))
        assert phase != "settle" or "prefill" not in seen.asked
