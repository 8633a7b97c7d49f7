"""What a request costs in Python, exactly: a later feature shows its price here.

Measured with the answers of pdserve's own workers: marks, usage, `x-pdserve-cached` and `server-timing`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pdserve.router.config.tenants import Access
from pdserve.router.native import heads
from pdserve.router.request.stream_marks import StreamMarks
from pdserve.router.tenants.api_keys import key_line
from tests.support.router.call_count import Bench, Cost, bench

STREAM = Cost(frames=64, c_calls=71, bytecodes=3203)
"""Of a stream of one chunk, with a prefill stage."""
WHOLE = Cost(frames=60, c_calls=62, bytecodes=2910)
"""Of a whole answer, with a prefill stage."""
TURN = Cost(frames=103, c_calls=118, bytecodes=4642)
"""Of a whole answer to a session's next turn, which comes at once, by a tenant with a key."""
CHUNK = Cost(frames=3, c_calls=5, bytecodes=157)
"""Of a further chunk."""
IN_PYTHON = Cost(frames=34, c_calls=226, bytecodes=2650)
"""More where the C module was not built."""
KEY = "key-of-a-test-0123456789"
SLACK = Cost(frames=0.5, c_calls=0.5, bytecodes=50)
"""What some of the requests do, like drawing ids for the next hundred."""


def check(measured: Bench, one: Cost, limit: Cost) -> None:
    is_compiled = heads.HeaderLines is not heads.PlainLines
    for of, cost, most, more, slack in zip(Cost._fields, one, limit, IN_PYTHON, SLACK, strict=True):
        assert cost <= most + slack + (0 if is_compiled else more), (of, cost, measured.most(of)[:40])


async def test_a_stream_and_its_chunks_cost_no_more_than_they_may(monkeypatch: pytest.MonkeyPatch) -> None:
    async with bench(monkeypatch) as measured:
        for limit, chunks in ((STREAM, 1), (WHOLE, 0)):
            check(measured, await measured.cost(chunks), limit)
        shorter, longer = await measured.cost(2), await measured.cost(42)
        for of, few, many, most, slack in zip(Cost._fields, shorter, longer, CHUNK, SLACK, strict=True):
            assert (many - few) / 40 <= most + slack / 5, (of, measured.most(of)[:10])


async def test_a_turn_of_a_tenants_session_costs_no_more_than_it_may(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "keys").write_text(key_line("alice", KEY))
    headers = f"x-session-id: s1\r\nauthorization: Bearer {KEY}\r\n"
    async with bench(monkeypatch, access=Access(keys_file=tmp_path / "keys")) as measured:
        check(measured, await measured.cost(0, headers=headers), TURN)


async def test_what_is_counted_is_what_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """One step more for each request shows: a function of the router, one of C, and the bytecodes."""
    async with bench(monkeypatch) as measured:
        before = await measured.cost(1)
        take = StreamMarks.take_last

        def longer(marks: StreamMarks, data: bytes) -> bytes:
            return take(marks, data)

        code = compile(
            "def one_more(f):\n  return lambda *given: (len(given), f(*given))[1]\n", "x.py", "exec"
        )
        names: dict[str, Any] = {}
        exec(code, names)
        monkeypatch.setattr(StreamMarks, "take_last", names["one_more"](longer))
        after = await measured.cost(1)
        assert round(after.frames - before.frames) == 1
        assert round(after.c_calls - before.c_calls) >= 1
        assert round(after.bytecodes - before.bytecodes) > 5
