from collections.abc import Sequence

from pdserve.kvpool.protocol.page_bytes import Bytes1D, PageBuffers
from pdserve.kvpool.protocol.slot_table import Buffer

INTERFACE: int

def read(
    arena: Bytes1D,
    table: Buffer,
    rows_at: int,
    offsets: list[int],
    checksums: list[int],
    slots: list[int],
    sequences: list[int],
    pages: Sequence[PageBuffers],
    checksum: bool,
    deadline_s: float,
    /,
) -> list[int]: ...
def write(
    arena: Bytes1D,
    offsets: list[int],
    pages: Sequence[PageBuffers],
    checksum: bool,
    deadline_s: float,
    /,
) -> list[int]: ...
def send_pages(
    fd: int, tags: list[int], pages: Sequence[PageBuffers], checksum: bool, deadline_s: float, /
) -> list[int]: ...
def receive_pages(
    fd: int,
    head: memoryview,
    head_bytes: int,
    tags: list[int],
    pages: Sequence[PageBuffers],
    checksum: bool,
    deadline_s: float,
    /,
) -> tuple[list[int], int]: ...
def exchange(fd: int, frame: bytes, most_bytes: int, answers: int, deadline_s: float, /) -> bytes: ...
