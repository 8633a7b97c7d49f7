"""What a request costs in Python, exactly: a later feature shows its price here.

Measured with the answers of pdserve's own workers: marks, usage, `x-pdserve-cached` and `server-timing`.
"""

from __future__ import annotations

import pytest

from tests.support.router.call_count import bench

STREAM = (140, 160)
"""Python frames and C functions of a stream of one chunk, with a prefill stage."""
CHUNK = (4, 6)
"""Of a further chunk."""


async def test_a_stream_and_its_chunks_cost_no_more_than_they_may(monkeypatch: pytest.MonkeyPatch) -> None:
    async with bench(monkeypatch) as measured:
        one = await measured.cost(1)
        assert (one.frames, one.c_calls) <= STREAM, measured.counts.most_common()
        longer, shorter = await measured.cost(42), await measured.cost(2)
        per_chunk = (longer.frames - shorter.frames) / 40, (longer.c_calls - shorter.c_calls) / 40
        assert per_chunk[0] <= CHUNK[0] + 0.5, per_chunk  # the marks are read in lots of a kilobyte
        assert per_chunk[1] <= CHUNK[1] + 0.5, per_chunk
