"""What a request costs in Python, exactly: a later feature shows its price here.

Measured with the answers of pdserve's own workers: marks, usage, `x-pdserve-cached` and `server-timing`.
"""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.router.request.stream_marks import StreamMarks
from tests.support.router.call_count import bench

STREAM = (110, 110)
"""Python frames and C functions of a stream of one chunk, with a prefill stage."""
CHUNK = (4, 6)
"""Of a further chunk."""


SLACK = 0.5
"""The sweep of deadlines, now and then."""


async def test_a_stream_and_its_chunks_cost_no_more_than_they_may(monkeypatch: pytest.MonkeyPatch) -> None:
    async with bench(monkeypatch) as measured:
        one = await measured.cost(1)
        assert one.frames <= STREAM[0] + SLACK, measured.most_frames()
        assert one.c_calls <= STREAM[1] + SLACK, measured.most_c_calls()
        shorter, longer = await measured.cost(2), await measured.cost(42)
        assert (longer.frames - shorter.frames) / 40 <= CHUNK[0] + SLACK
        assert (longer.c_calls - shorter.c_calls) / 40 <= CHUNK[1] + SLACK


async def test_what_is_counted_is_what_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """One step more for each request shows, in a function of the router and in one of C."""
    async with bench(monkeypatch) as measured:
        before = await measured.cost(1)
        take = StreamMarks.take_any

        def longer(marks: StreamMarks, data: bytes, at_end: bool) -> bytes:
            return take(marks, data, at_end)

        code = compile(
            "def one_more(f):\n  return lambda *given: (len(given), f(*given))[1]\n", "x.py", "exec"
        )
        names: dict[str, Any] = {}
        exec(code, names)
        monkeypatch.setattr(StreamMarks, "take_any", names["one_more"](longer))
        after = await measured.cost(1)
        assert round(after.frames - before.frames) == 1
        assert round(after.c_calls - before.c_calls) >= 1
