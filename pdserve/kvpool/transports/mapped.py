"""Moving pages between a client's buffers and an arena that is mapped into its memory."""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.errors import PoolTimeout, PoolUnavailable
from pdserve.kvpool.native import copying
from pdserve.kvpool.native.build import compiled
from pdserve.kvpool.protocol.messages import Grant, Pin
from pdserve.kvpool.protocol.page_bytes import Bytes1D, PageBuffers
from pdserve.kvpool.protocol.slot_table import RowReader
from pdserve.kvpool.transports.base import PageOutcome


class MappedPages:
    """Copies pages to and from `memory`, the arena, shape [arena_bytes]. Thread-safe."""

    def __init__(self, memory: Bytes1D, rows: RowReader, checksum: bool) -> None:
        self._memory = memory
        self._rows = rows
        self._checksum = checksum
        compiled()  # says now if pages will be slow

    def write(self, grants: Sequence[Grant], pages: Sequence[PageBuffers], deadline_s: float) -> list[int]:
        """`Connection.write_pages`. Raises PoolTimeout; PoolUnavailable if a slot is outside the arena."""
        offsets = [grant.offset for grant in grants]
        try:
            return copying.write(self._memory, offsets, pages, checksum=self._checksum, deadline_s=deadline_s)
        except TimeoutError as error:
            raise PoolTimeout(str(error)) from error
        except (IndexError, OverflowError) as error:
            raise _outside(error) from error

    def read(self, pins: Sequence[Pin], pages: Sequence[PageBuffers], deadline_s: float) -> list[PageOutcome]:
        """`Connection.read_pages`. Raises PoolTimeout; PoolUnavailable if a slot is outside the arena."""
        try:
            return copying.read(
                self._memory,
                self._rows,
                [pin.offset for pin in pins],
                [pin.checksum for pin in pins],
                [pin.slot for pin in pins],
                [pin.sequence for pin in pins],
                pages,
                checksum=self._checksum,
                deadline_s=deadline_s,
            )
        except TimeoutError as error:
            raise PoolTimeout(str(error)) from error
        except (IndexError, OverflowError) as error:
            raise _outside(error) from error

    def check_place(self, pin: Pin, size_bytes: int) -> None:
        """Raises PoolUnavailable if the slot is outside the arena."""
        if not (0 <= pin.offset <= self._memory.size - size_bytes and 0 <= pin.slot < self._rows.count):
            raise _outside(IndexError(f"slot {pin.slot} is outside of the memory"))


def _outside(error: Exception) -> PoolUnavailable:
    return PoolUnavailable(f"the pool node named a slot that is outside its memory: {error}")
