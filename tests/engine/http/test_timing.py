"""Where the time to a first token went, as a header says it."""

from __future__ import annotations

from pdserve.engine.http.timing import FirstToken


def test_the_header_is_in_milliseconds() -> None:
    first = FirstToken({"queue": 0.3, "pull": 0.2, "compute": 0.25})
    assert first.timing() == b"queue;dur=300.0, pull;dur=200.0, compute;dur=250.0"
