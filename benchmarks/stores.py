"""What is measured beside each other: anything that stores pages under keys and fills buffers with them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from pdserve.errors import PdserveError
from pdserve.kvpool.client.client import PoolClient
from pdserve.kvpool.protocol.page_bytes import Bytes1D, PageBuffers


class BenchError(PdserveError):
    """The benchmark could not measure: a page was refused or lost, a tool is missing."""


class PageStore(Protocol):
    """One contender. Pages have one segment each."""

    def lend(self, blocks: Sequence[Bytes1D]) -> AbstractContextManager[None]:
        """Every page's buffer lies in one of these blocks while this is open (a store may register them)."""
        ...

    def put(self, keys: Sequence[bytes], pages: Sequence[PageBuffers]) -> None:
        """Store a batch. Raises BenchError unless all of it is stored."""
        ...

    def get(self, keys: Sequence[bytes], pages: Sequence[PageBuffers]) -> None:
        """Fill the buffers. Raises BenchError unless all of them are filled."""
        ...

    def forget(self, keys: Sequence[bytes]) -> None:
        """These are not asked for again. Not measured: it spares a peer its eviction."""
        ...


class PoolStore:
    """pdserve's pool, through its client. It evicts by itself, inside what is measured."""

    def __init__(self, client: PoolClient) -> None:
        self._client = client

    def lend(self, blocks: Sequence[Bytes1D]) -> AbstractContextManager[None]:
        return nullcontext()

    def put(self, keys: Sequence[bytes], pages: Sequence[PageBuffers]) -> None:
        if not all(self._client.put(keys, pages)):
            raise BenchError(
                "the pool did not store a page: is its capacity large enough, and the node well?"
            )

    def get(self, keys: Sequence[bytes], pages: Sequence[PageBuffers]) -> None:
        if not all(self._client.get(keys, pages)):
            raise BenchError("the pool did not return a page that was just put")

    def forget(self, keys: Sequence[bytes]) -> None:
        pass
