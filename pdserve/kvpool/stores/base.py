"""The `PageStore` contract: what pdserve needs of a store of pages.

A store holds pages of bytes under keys of 32 bytes, in namespaces. A page is immutable: whoever writes a key
writes the same bytes. The page mover and a worker's HTTP process hold one client of the store each, and call
it from several threads at once. `PoolClient`, for pool nodes, is one implementation.

Guarantees of a store:

- A page is there for readers with all of its bytes, or not at all. `exists` says True only of such a page, to
  every client, at the latest a moment after `put` returned True.
- `get` answers True only where the buffers hold exactly the bytes that were put under that key in that
  namespace. A page of another length is not there.
- The answers are as many as the keys, in their order. A page that fails spoils no other page of the batch.
- When `get` returns, nothing writes into the buffers any more. When `put` returns, nothing reads them.
- A fault is a miss, or PoolError; no other exception.
- Calls end within the times of `StoreSettings`, or soon after. A page mover that does not answer is killed; a
  store must bear that its client dies at any moment.
- Where there is no room, old pages leave, or `put` answers False. It never waits for room.

A kind is a callable that takes `StoreSettings` and returns a `PageStore`. It is found by the entry point
group `pdserve.kvpool.stores`; the entry point's name is the value of `pool.engine`. It may raise ConfigError
(bad options) and PoolError (the store cannot be reached now; it is tried again). A kind may have two
attributes, for the start of a worker. `lacks`, a tuple of words, says what pool nodes do and this store does
not. `check_options(settings)` raises ConfigError where the store can never work.
tests/contracts/test_store_contract.py holds every kind to the above.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias, TypeVar

import msgspec

from pdserve.errors import ConfigError, PoolError
from pdserve.kvpool.protocol.page_bytes import Bytes1D, PageBuffers

Options = TypeVar("Options")


@dataclass(frozen=True)
class StoreSettings:
    """The arguments of a store's client.

    `namespace`: of all keys. It names the geometry of the pages too, so that pages of another one are never
    met. `options`: `pool.options` as configured. `memory`: blocks in which the buffers of most calls lie, for
    stores that register memory; they live as long as the client.
    """

    namespace: str
    options: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    memory: Sequence[Bytes1D] = ()
    exists_timeout_s: float = 1.0
    get_timeout_s: float = 5.0
    put_timeout_s: float = 5.0


class PageStore(Protocol):
    """A client of a store, for one namespace. Thread-safe. See the module for what it guarantees."""

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """For each key: whether its page can be read."""
        ...

    def get(self, keys: Sequence[bytes], pages: Sequence[PageBuffers]) -> list[bool]:
        """Read pages into the caller's buffers. The contents of the others (False) are undefined.

        `pages`: for each key its segments, each uint8, contiguous, of the same lengths in all pages.
        """
        ...

    def put(self, keys: Sequence[bytes], pages: Sequence[PageBuffers]) -> list[bool]:
        """Write pages. True: the page is in the store, or another writer is writing it."""
        ...

    def clear(self) -> int:
        """Drop the namespace's pages; how many. A store may leave those that were used a moment ago."""
        ...

    def check(self) -> dict[str, PoolError | None]:
        """For each part of the store, by name: None, or why it does not serve us. Bounded by
        `exists_timeout_s`.
        """
        ...

    def close(self) -> None:
        """Idempotent. Calls in progress end; later ones are misses, or PoolError."""
        ...


MakeStore: TypeAlias = Callable[[StoreSettings], PageStore]


def read_options(settings: StoreSettings, kind: str, wanted: type[Options]) -> Options:
    """A store's own options as a struct. Raises ConfigError."""
    try:
        return msgspec.convert(dict(settings.options), wanted)
    except (msgspec.ValidationError, ValueError) as error:
        raise ConfigError(f'pool.options of pool.engine = "{kind}": {error}') from error
