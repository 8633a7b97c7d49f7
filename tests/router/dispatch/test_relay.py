from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdserve.router.dispatch.stream_marks import MAX_HELD_BYTES, split_events

BYTES = st.text("ab\n\r").map(str.encode)


@given(st.lists(BYTES))
def test_cutting_at_events_loses_and_changes_nothing(chunks: list[bytes]) -> None:
    sent, held = b"", b""
    for chunk in chunks:
        ready, held = split_events(held + chunk)
        assert ready == b"" or ready.endswith((b"\n\n", b"\r\n\r\n"))
        sent += ready
    assert sent + held == b"".join(chunks)
    assert b"\n\n" not in held
    assert b"\r\n\r\n" not in held


def test_an_endless_event_is_not_held_for_ever() -> None:
    data = b"x" * (MAX_HELD_BYTES + 1)
    assert split_events(data) == (data, b"")
