"""The `Tier` contract: a storage tier keeps committed pages outside the arena and finds them by name.

A page's name is its space, its key and its length. A space is a number of 64 bits that stands for a namespace
(namespaces/catalog.py). The node never reuses a space, not even after a restart. It never requests pages of a
space that it does not know.

A tier is a small class of blocking methods, called from that tier's own threads and never from the node's
event loop:

    one writer thread     `scan` first, to its end; then `put`, `forget`, `forget_space`, `erase`, `maintain`,
                          in any order
    some reader threads   `read`, at any time, several at once, beside everything above
    any thread            `namespaces`, `save_namespaces`: one call at a time, beside everything above

A tier has its own index. The node has another one, made from the tier's reports (`scan`, `put`, `leaving`),
so a lookup needs no disk. An index may list a page that the tier has lost; reading it is a miss.

Guarantees of a tier:

- `read` answers OK only with exactly the bytes that were put under that name: each page is stored with a
  checksum (the writer's where there is one, else the tier's own) and checked when it is read.
- Errors are data: a page that cannot be written or read does not affect other pages of the batch. No method
  raises, except the constructor.
- `used_bytes` never exceeds `capacity_bytes`. Pages evicted for lack of room are passed to `leaving` while
  they can still be read.
- Stored pages survive `close` and a killed process, except pages whose write was interrupted. Such a torn
  page is detected and left out.
- A saved text survives a power failure once `save_namespaces` has returned.

A tier is found by the entry point group `pdserve.kvpool.tiers`; the entry point's name is its `kind` in the
node's configuration. tests/contracts/test_tier_contract.py holds every tier to the above.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol, TypeAlias, runtime_checkable

import msgspec
import numpy as np
import numpy.typing as npt

TIER_ALIGN_BYTES: Final = 4096

# status of one page in `put`
STORED: Final = 0
REFUSED: Final = 1  # the page does not fit, or there is no room; the tier itself works
WRITE_FAILED: Final = 2  # the tier cannot write now; try again later

# status of one page in `read`
LOADED: Final = 0
GONE: Final = 1  # the page is not (or no longer) here, or has another length
CORRUPT: Final = 2  # the bytes are not those that were put
READ_FAILED: Final = 3  # the device reported a read error

# One page's memory, 1-D uint8: starts on a 4 KiB boundary and has `padded(length_bytes)` bytes, of which the
# first `length_bytes` count. The rest may be written out and may be overwritten.
PageMemory: TypeAlias = npt.NDArray[np.uint8]
Option: TypeAlias = str | int | float | bool


def padded(length_bytes: int) -> int:
    """The length rounded up to whole blocks."""
    return -(-length_bytes // TIER_ALIGN_BYTES) * TIER_ALIGN_BYTES


def page_memories(lengths: Sequence[int]) -> list[PageMemory]:
    """Aligned memory for pages of these lengths, one mapping for all."""
    sizes = [padded(length) for length in lengths]
    whole = np.frombuffer(mmap.mmap(-1, sum(sizes)), np.uint8)
    ends = np.cumsum(sizes).tolist()
    return [whole[end - size : end] for size, end in zip(sizes, ends, strict=True)]


class PageName(msgspec.Struct, frozen=True, gc=False):
    """The name of a page. Another length under the same key is another page."""

    space: int
    key: bytes
    length_bytes: int


class TierPage(msgspec.Struct, frozen=True, gc=False):
    """The metadata of a stored page. `checksum`: the writer's (0: none). `sequence`: that of its slot.

    A tier whose `scan` opens no page reports both as 0 there.
    """

    space: int
    key: bytes
    length_bytes: int
    checksum: int
    sequence: int


class SpaceFacts(msgspec.Struct, frozen=True):
    """The namespace of a space, for tiers that need more than the number.

    `name`: of the namespace. `shared`: 32 hexadecimal digits, the same on all nodes for the same pages.
    `item_bytes`: the size of one number of its KV; 1 if unknown.
    """

    name: str
    shared: str
    item_bytes: int = 1


class PutResult(msgspec.Struct, frozen=True):
    """`statuses`: one for each page, in order. `error`: the text of a WRITE_FAILED."""

    statuses: list[int]
    error: str = ""


class ReadResult(msgspec.Struct, frozen=True):
    """`page` is set when the status is LOADED."""

    status: int
    page: TierPage | None = None


def _no_facts(space: int) -> SpaceFacts | None:
    return None


def _ignore(pages: Sequence[object]) -> None:
    """For tiers that belong to no node."""


@dataclass(frozen=True)
class TierSettings:
    """The arguments of a tier.

    The writer's thread calls `leaving` with pages that will be evicted for lack of room. `read` still finds
    them during the call. `leaving` may read them and returns soon.

    `facts` says what is known of a space, from any thread. `found` and `lost` take reports of pages that
    somebody else added or removed (`SharedTier`), from any thread.
    """

    node: str
    path: Path
    capacity_bytes: int
    options: Mapping[str, Option]
    leaving: Callable[[Sequence[PageName]], None]
    facts: Callable[[int], SpaceFacts | None] = _no_facts
    found: Callable[[Sequence[TierPage]], None] = _ignore
    lost: Callable[[Sequence[PageName]], None] = _ignore


class Tier(Protocol):
    """The contract of the module's docstring. `Kind(settings)` opens a tier.

    The constructor raises StartupError if the path cannot be used, and ConfigError for a wrong option.
    """

    capacity_bytes: int

    @property
    def used_bytes(self) -> int:
        """Used bytes of the device, including overhead. Callable from any thread."""
        ...

    def namespaces(self) -> str | None:
        """The text last saved by `save_namespaces`, or None."""
        ...

    def save_namespaces(self, text: str | None) -> str:
        """Store this text durably, or remove it (None). Returns "" or an error text."""
        ...

    def scan(self, known: Collection[int]) -> Iterator[list[TierPage]]:
        """Report the pages that survived since the tier was last open, in batches of bounded size.

        If a page is reported twice, the last report counts. Pages can be read after their report. `known`:
        the spaces whose pages count. Pages of other spaces are removed soon.
        """
        ...

    def put(self, pages: Sequence[TierPage], data: Sequence[PageMemory]) -> PutResult:
        """Store a batch. A page replaces an earlier one with the same key in its space."""
        ...

    def read(self, names: Sequence[PageName], into: Sequence[PageMemory]) -> list[ReadResult]:
        """Read a batch into the given memory. Memory of a page that is not LOADED is undefined."""
        ...

    def forget(self, names: Sequence[PageName]) -> None:
        """Forget these pages: `read` finds them no more. A later `scan` may report them again."""
        ...

    def forget_space(self, space: int) -> None:
        """Forget all pages of the space and free their room soon.

        A later `scan` may report them again if the space is known then.
        """
        ...

    def erase(self, space: int, keys: Collection[bytes] | None = None) -> str:
        """As `forget` for these pages, of any length, or (None) as `forget_space`; and none of their bytes
        are in the tier after the return. Returns "" or a text that says what is left.
        """
        ...

    def maintain(self) -> bool:
        """Do one short step of background work. True if there is more to do."""
        ...

    def close(self) -> None:
        """Idempotent."""
        ...


@runtime_checkable
class SharedTier(Protocol):
    """A tier whose pages all nodes of a pool share, so each node indexes all of them.

    Pages have the name of their namespace there (`SpaceFacts.shared`) instead of a node's space. `forget`
    changes this node's index only. `forget_space` removes the pages for all nodes.
    """

    def open_space(self, space: int) -> None:
        """`settings.facts` knows this space from now on. Its pages are reported by `settings.found`."""
        ...

    def has(self, name: PageName) -> bool:
        """Whether the page is indexed. Callable from any thread."""
        ...


FIRST_S: Final = 1.0  # the first pause; it doubles with each failure in a row
MAX_S: Final = 60.0
MAX_DOUBLINGS: Final = 6  # enough to reach MAX_S; it bounds the exponent


@dataclass(slots=True)
class Backoff:
    """`failures`: failed writes in a row; 0: the tier works, as far as known.

    Failures before `retry_at_s` come from writes that began before the first failure. They count as one.
    """

    failures: int = 0
    retry_at_s: float = 0.0

    def failed(self, now_s: float) -> None:
        """A write failed."""
        if now_s < self.retry_at_s:
            return
        doublings = min(self.failures, MAX_DOUBLINGS)
        self.failures += 1
        self.retry_at_s = now_s + min(MAX_S, FIRST_S * 2**doublings)

    def worked(self) -> None:
        """A write succeeded."""
        self.failures = 0
        self.retry_at_s = 0.0
