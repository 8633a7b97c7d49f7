"""What a pool node tells others of its pages: batches of events in the formats of other stacks. Pure.

A batch goes over ZeroMQ as SGLang 0.5.23 and vLLM send theirs: a topic, a number of 8 bytes (big-endian) that
grows by one with each batch, and msgpack of `[time, events, 0]`. A gap in the numbers means that batches were
lost.

`blocks` are SGLang's own events (`sglang/srt/disaggregation/kv_events.py`). A block is named by the first 8
bytes of its page's name, as SGLang names it in the events of its workers, so one stream can be joined to the
other. A node knows no tokens, so `token_ids` is empty: vLLM does the same for the tiers below the device, and
llm-d's indexer then looks up the block that an engine has told before.

`objects` are those of Mooncake's master, which Dynamo's KV router reads (`--shared-cache-type hicache`). It
makes the names of a prompt's pages from its tokens, so it needs none. A name is
NAMESPACE_PAGE__k: the page's name in hexadecimal, and the suffix of a store with one object for each page.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, NamedTuple, Protocol, TypeAlias

import msgspec

EventFormat: TypeAlias = Literal["blocks", "objects"]
MEDIUM: Final = "EXTERNAL"  # SGLang's word for a pool that workers share
OBJECT_SUFFIX: Final = "__k"
TENANT: Final = "default"
SEQUENCE_BYTES: Final = 8


class Told(NamedTuple):
    """A page of a namespace with pages of `page_tokens` tokens. `place`: "dram" or a kind of tier; empty:
    nowhere.
    """

    namespace: str
    page_tokens: int
    key: bytes
    place: str


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """SGLang's event with two fields of ours at its end, which other readers pass over."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None = None
    namespace: str = ""
    tier: str = ""


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """The blocks are in no tier of the node any more."""

    block_hashes: list[int]
    medium: str | None = None
    namespace: str = ""


class AllBlocksCleared(msgspec.Struct, tag=True):
    """What the node told before is void. It tells all that it has anew."""


class ObjectEvent(msgspec.Struct, gc=False):
    """Mooncake's."""

    event_type: Literal["stored", "removed"]
    object_key: str
    tenant_id: str = TENANT


class Format(Protocol):
    """Makes payloads. `now_s`: seconds since 1970."""

    def batch(self, pages: Sequence[Told], now_s: float) -> bytes:
        """Of pages, in the order of what happened to them."""
        ...

    def void(self, now_s: float) -> bytes | None:
        """Void all that was told. None: the format has no such event, a gap in the numbers says it."""
        ...


def block_hash(key: bytes) -> int:
    """SGLang's integer name of a page: 8 bytes of its digest, signed."""
    return int.from_bytes(key[:8], "big", signed=True)


def object_key(namespace: str, key: bytes) -> str:
    """The name of a page as an object."""
    return f"{namespace}_{key.hex()}{OBJECT_SUFFIX}"


_encode: Final = msgspec.msgpack.Encoder().encode


class Blocks:
    """`Format` of SGLang and vLLM. Neighbours of one kind are one event."""

    def batch(self, pages: Sequence[Told], now_s: float) -> bytes:
        """See `Format`."""
        events: list[BlockStored | BlockRemoved] = []
        last: tuple[str, str] | None = None
        for namespace, page_tokens, key, place in pages:
            if (namespace, place) == last:
                events[-1].block_hashes.append(block_hash(key))
                continue
            last, hashes = (namespace, place), [block_hash(key)]
            if place:
                events.append(BlockStored(hashes, None, [], page_tokens, None, MEDIUM, namespace, place))
            else:
                events.append(BlockRemoved(hashes, MEDIUM, namespace))
        return _encode((now_s, events, 0))

    def void(self, now_s: float) -> bytes:
        """See `Format`."""
        return _encode((now_s, [AllBlocksCleared()], 0))


class Objects:
    """`Format` of Mooncake, as Dynamo reads it. Its times are whole milliseconds."""

    def batch(self, pages: Sequence[Told], now_s: float) -> bytes:
        """See `Format`."""
        events = [
            ObjectEvent("stored" if place else "removed", object_key(namespace, key))
            for namespace, _, key, place in pages
        ]
        return _encode((int(now_s * 1000), events, 0))

    def void(self, now_s: float) -> None:
        """See `Format`: Dynamo forgets all at a gap."""
        return


FORMATS: Final[dict[EventFormat, type[Format]]] = {"blocks": Blocks, "objects": Objects}
