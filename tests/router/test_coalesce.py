from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from pdserve.router.coalesce import CoalescingTransport

HEAD = b"HTTP/1.1 200 OK\r\n\r\n"


class Recorder:
    """The transport within: what was sent, write by write, and whether it was closed."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.closed = False

    def write(self, data: bytes) -> None:
        assert not self.closed
        self.sent.append(data)

    def close(self) -> None:
        self.closed = True

    def __getattr__(self, name: str) -> Any:
        return None


def test_a_head_goes_out_with_the_body_that_follows() -> None:
    async def main() -> None:
        inner = Recorder()
        transport = CoalescingTransport(inner, asyncio.get_running_loop())  # type: ignore[arg-type]
        transport.write(HEAD)
        transport.write(b"one")
        transport.write(b"two")
        assert inner.sent == [HEAD + b"one", b"two"]
        await asyncio.sleep(0)
        assert len(inner.sent) == 2

    asyncio.run(main())


def test_a_head_alone_waits_for_one_turn_of_the_loop_only() -> None:
    async def main() -> None:
        inner = Recorder()
        transport = CoalescingTransport(inner, asyncio.get_running_loop())  # type: ignore[arg-type]
        transport.write(HEAD)
        await asyncio.sleep(0)
        assert inner.sent == [HEAD]

    asyncio.run(main())


@given(st.lists(st.sampled_from([HEAD, b"x", b"HTTP/1.1 ", b"turn"]), max_size=20))
def test_nothing_is_lost_or_reordered(writes: list[bytes]) -> None:
    async def main() -> None:
        inner = Recorder()
        transport = CoalescingTransport(inner, asyncio.get_running_loop())  # type: ignore[arg-type]
        for data in writes:
            if data == b"turn":
                await asyncio.sleep(0)
            else:
                transport.write(data)
        transport.close()
        assert b"".join(inner.sent) == b"".join(data for data in writes if data != b"turn")
        assert inner.closed

    asyncio.run(main())
