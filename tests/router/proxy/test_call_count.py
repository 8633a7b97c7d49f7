"""What a request costs in Python, exactly: a later feature shows its price here.

Measured with the answers of pdserve's own workers: marks, usage, `x-pdserve-cached` and `server-timing`.
"""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.router.native import heads
from pdserve.router.request.stream_marks import StreamMarks
from tests.support.router.call_count import Cost, bench

STREAM = Cost(frames=65, c_calls=74, bytecodes=3337)
"""Of a stream of one chunk, with a prefill stage."""
WHOLE = Cost(frames=62, c_calls=68, bytecodes=3121)
"""Of a whole answer, with a prefill stage."""
CHUNK = Cost(frames=3, c_calls=5, bytecodes=174)
"""Of a further chunk."""
IN_PYTHON = Cost(frames=32, c_calls=220, bytecodes=2600)
"""More where the C module was not built."""
SLACK = Cost(frames=0.5, c_calls=0.5, bytecodes=50)
"""What some of the requests do, like drawing ids for the next hundred."""


async def test_a_stream_and_its_chunks_cost_no_more_than_they_may(monkeypatch: pytest.MonkeyPatch) -> None:
    is_compiled = heads.HeaderLines is not heads.PlainLines
    async with bench(monkeypatch) as measured:
        for limit, chunks in ((STREAM, 1), (WHOLE, 0)):
            one = await measured.cost(chunks)
            for of, cost, most, more, slack in zip(Cost._fields, one, limit, IN_PYTHON, SLACK, strict=True):
                assert cost <= most + slack + (0 if is_compiled else more), (of, cost, measured.most(of)[:40])
        shorter, longer = await measured.cost(2), await measured.cost(42)
        for of, few, many, most, slack in zip(Cost._fields, shorter, longer, CHUNK, SLACK, strict=True):
            assert (many - few) / 40 <= most + slack / 5, (of, measured.most(of)[:10])


async def test_what_is_counted_is_what_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """One step more for each request shows: a function of the router, one of C, and the bytecodes."""
    async with bench(monkeypatch) as measured:
        before = await measured.cost(1)
        take = StreamMarks.take

        def longer(marks: StreamMarks, data: bytes, at_end: bool) -> bytes:
            return take(marks, data, at_end)

        code = compile(
            "def one_more(f):\n  return lambda *given: (len(given), f(*given))[1]\n", "x.py", "exec"
        )
        names: dict[str, Any] = {}
        exec(code, names)
        monkeypatch.setattr(StreamMarks, "take", names["one_more"](longer))
        after = await measured.cost(1)
        assert round(after.frames - before.frames) == 1
        assert round(after.c_calls - before.c_calls) >= 1
        assert round(after.bytecodes - before.bytecodes) > 5
