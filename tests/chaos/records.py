"""What workers and faults write down, and the judge reads. Pure.

Times are of CLOCK_MONOTONIC, in s: one clock for all processes of a machine.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

Became: TypeAlias = Literal["done", "left out", "failed"]


class Asked(msgspec.Struct, frozen=True, tag="asked", omit_defaults=True):
    """One operation of a client.

    `ok` goes with `pages`. Of a put, only what this client committed itself: pages that were there, or that
    another was writing, are in neither. Of "confirmed" (exists, then get) only the pages that existed; of a
    get all. `wrong`: pages that were handed out with other bytes than theirs. `corrupt`: how many pages the
    client itself found damaged. `limit_s`: what the client's configuration grants the operation. `up`: all
    nodes were well, as far as the client knew when it began.
    """

    kind: Literal["put", "get", "confirmed"]
    worker: str
    start_s: float
    end_s: float
    limit_s: float
    pages: list[int]
    ok: list[bool]
    wrong: list[int] = []
    corrupt: int = 0
    up: bool = True


class Acted(msgspec.Struct, frozen=True, tag="acted"):
    """What became of a fault. "left out": it was not possible then; `why`, also of one that failed."""

    at_s: float
    kind: str
    node: str
    became: Became
    why: str = ""


class Disturbed(msgspec.Struct, frozen=True, tag="disturbed"):
    """From start to end a node (or all, if empty) could not be expected to answer."""

    start_s: float
    end_s: float
    kind: str
    node: str


class Stopped(msgspec.Struct, frozen=True, tag="stopped"):
    """A client itself did not run from start to end. `killed`: another took its place, else it went on."""

    start_s: float
    end_s: float
    client: str
    killed: bool = False


class Starved(msgspec.Struct, frozen=True, tag="starved"):
    """From start to end the machine gave a client no processor."""

    start_s: float
    end_s: float
    client: str


class Lost(msgspec.Struct, frozen=True, tag="lost"):
    """From now on these pages (all, if none are named) need not be there until they are written again."""

    at_s: float
    pages: list[int] = []


class Flipped(msgspec.Struct, frozen=True, tag="flipped"):
    """A bit of a page was flipped and the page read at once. "replaced": it was gone, or written anew."""

    at_s: float
    node: str
    page: int
    outcome: Literal["detected", "delivered", "replaced"]
    where: Literal["memory", "ssd"] = "memory"


class Abandoned(msgspec.Struct, frozen=True, tag="abandoned"):
    """A client was killed. `left_bytes`: the least that was seen reserved within 30 s; `after_s`: when."""

    at_s: float
    reserved_bytes: int
    left_bytes: int
    after_s: float


class Moved(msgspec.Struct, frozen=True, tag="moved"):
    """A node joined or left: from start to end pages moved. Of the `all_pages` that were there before and are
    still there, in memory or below, `moved_pages` came to the one that joined `nodes` others; a node that
    left has 0 of 0, one that could not join too (`error`: why), and one beside which a node was away, so that
    nobody could count.
    """

    start_s: float
    end_s: float
    node: str
    nodes: int
    moved_pages: int = 0
    all_pages: int = 0
    error: str = ""


class Restarted(msgspec.Struct, frozen=True, tag="restarted"):
    """A node was started again; it answered `after_s` later, with so many pages, and gave one of the `asked`
    pages that it had before `hit_s` after its start (none: it gave none in time).
    """

    at_s: float
    node: str
    after_s: float
    pages: int
    hit_s: float | None = None
    asked: int = 0


class Upgraded(msgspec.Struct, frozen=True, tag="upgraded"):
    """A node was told to upgrade at `start_s`; at `end_s` the pool was whole again. `error`: why it
    failed, or was another process afterwards. `lost` of `pages` that it had before are on no node any more.
    """

    start_s: float
    end_s: float
    node: str
    pages: int
    lost: int
    error: str = ""


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """A process at the end of the run: whether it ended by itself in time, and what is wrong with it."""

    name: str
    clean: bool
    complaint: str = ""


Record: TypeAlias = (
    Asked
    | Acted
    | Disturbed
    | Stopped
    | Starved
    | Lost
    | Flipped
    | Abandoned
    | Moved
    | Restarted
    | Upgraded
    | Ended
)

_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[Record] = msgspec.json.Decoder(Record)


def to_line(record: Record) -> bytes:
    return _encoder.encode(record) + b"\n"


def read_lines(text: bytes) -> list[Record]:
    """A last line that a kill cut short is left out."""
    return [_decoder.decode(line) for line in text.split(b"\n")[:-1]]
