"""The pages of weights in a pool: one namespace for all content, and a small one for each revision.

    weights             content: pages named by their bytes, shared by all revisions
    weights/NAME@REV    the manifest's pages, and two first pages with the same content:
                        "plan"   written before the content: its pages are wanted
                        "whole"  written last: every page was there; readers look for this one only

So an interrupted push leaves a revision that no reader takes. Removing a revision drops its namespace: all
nodes keep that in mind, and a node that was away does not bring it back. Both namespaces have the policy
"keep" (nothing of them is evicted) and a small weight: KV traffic goes first.

Reading gives right pages, or an error that names what is lacking. No page is read unchecked.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Final, Literal, TypeAlias

import numpy as np
from msgspec.structs import replace

from pdserve.errors import PoolRefused, RequestRefused, WeightsError
from pdserve.kvpool.admin.node_client import NodeClient
from pdserve.kvpool.client.client import PoolClient
from pdserve.kvpool.client.config import PoolClientConfig
from pdserve.kvpool.client.connector import connector_for
from pdserve.kvpool.namespaces.access import KEPT, TOKENS
from pdserve.kvpool.policies import KEEP
from pdserve.kvpool.protocol.cluster_messages import (
    ListNamespaces,
    NamespaceList,
    PutNamespace,
)
from pdserve.kvpool.protocol.messages import Done
from pdserve.kvpool.protocol.page_bytes import NO_CHECKSUM, Bytes1D
from pdserve.kvpool.protocol.page_tag import page_key_id
from pdserve.kvpool.weights.manifest import (
    FORMAT,
    PAGE_BYTES,
    ROOT_BYTES,
    Manifest,
    Piece,
    Root,
    cut_bytes,
    decode_manifest,
    decode_root,
    encode_root,
    fixed_key,
    is_right,
)
from pdserve.kvpool.weights.names import ModelName, parse_model
from pdserve.kvpool.weights.place import ask_pool
from pdserve.security.tokens import reveal

ATTEMPTS: Final = 3
PAUSE_S: Final = 0.5  # between attempts: a node that was lost has an heir soon


class PageReader:
    """Reads pages of one model. Thread-safe. `model`: for errors."""

    def __init__(self, client: PoolClient, model: str) -> None:
        self._client = client
        self.model = model

    @property
    def from_tiers(self) -> bool:
        """Whether some page so far was in a tier only."""
        return self._client.counters.pages_ssd > 0

    @property
    def is_near(self) -> bool:
        """Whether pages are copied from memory of this host, as far as is known."""
        return self._client.is_near and not self.from_tiers

    def raise_pages(self, pieces: Sequence[Piece]) -> None:
        """Have pages loaded from tiers that are wanted soon."""
        self._client.raise_pages([piece.key for piece in pieces])

    def read(self, path: str, pieces: Sequence[Piece], into: Sequence[Bytes1D]) -> None:
        """Fill `into`, for each piece uint8 of shape [piece.length], writable.

        Raises WeightsError that names the file `path`, a page that is lost or damaged, and the nodes that do
        not answer. Then the contents of `into` are undefined, and nothing writes into them any more.
        """
        left = list(range(len(pieces)))
        damaged: list[int] = []
        problem, corrupt_before = "", self._client.counters.pages_corrupt
        for attempt in range(ATTEMPTS):
            if attempt:
                time.sleep(PAUSE_S)
                checked = self._client.check()
                problem = "".join(f"; {error}" for error in checked.values() if error is not None)
            left, damaged = self._read_some(left, pieces, into)
            if not left:
                return
        if damaged:
            # read wrong each time: it goes, so that the next push writes it
            self._client.remove([pieces[i].key for i in damaged])
        elif self._client.counters.pages_corrupt > corrupt_before:
            damaged = left  # the client has dropped it already
        if damaged:
            raise self._error(path, pieces, damaged, "damaged (its bytes do not match its digest)")
        raise self._error(path, pieces, left, f"not in the pool{problem}")

    def _read_some(
        self, places: Sequence[int], pieces: Sequence[Piece], into: Sequence[Bytes1D]
    ) -> tuple[list[int], list[int]]:
        """One attempt; (the places that were not read, those of them whose bytes were wrong)."""
        left: list[int] = []
        damaged: list[int] = []
        for stored in sorted({pieces[i].stored for i in places}):
            chosen = [i for i in places if pieces[i].stored == stored]
            pages = [_page_for(pieces[i], into[i]) for i in chosen]
            checksums = [NO_CHECKSUM] * len(chosen)
            keys = [pieces[i].key for i in chosen]
            found = self._client.get(keys, [[page] for page in pages], checksums=checksums)
            for i, page, there, checksum in zip(chosen, pages, found, checksums, strict=True):
                if not there:
                    left.append(i)
                elif not is_right(pieces[i], page, checksum):
                    left.append(i)
                    damaged.append(i)
                elif page is not into[i]:
                    into[i][:] = page[: pieces[i].length]
        return sorted(left), damaged

    def _error(self, path: str, pieces: Sequence[Piece], places: Sequence[int], what: str) -> WeightsError:
        key = pieces[places[0]].key.hex()[:16]
        page = f"page {key}" if len(places) == 1 else f"page {key} and {len(places) - 1} more"
        return WeightsError(
            f"{self.model}: {path}: {page} {'is' if len(places) == 1 else 'are'} {what}: push {self.model} "
            "again from its directory; only what is lacking is written"
        )


def _page_for(piece: Piece, into: Bytes1D) -> Bytes1D:
    """Where the whole page is read to: the place itself, where nothing of it is padding."""
    return into if piece.length == piece.stored else np.empty(piece.stored, np.uint8)


logger = logging.getLogger(__name__)

NAMESPACE: Final = "weights"
WEIGHT: Final = 0.1
"""Of weights at a busy node; a namespace of KV pages has 1."""
PATIENCE: Final = {"connect_timeout_s": 5.0, "exists_timeout_s": 10.0, "get_timeout_s": 30.0}
WRITE_PATIENCE: Final = {**PATIENCE, "put_timeout_s": 60.0}
"""A model is not worth less because a node is busy: no token of a client waits for it."""
WRITTEN_S: Final = 30.0
"""For another client that writes the same page at the same time."""
POLL_S: Final = 0.02
First: TypeAlias = Literal["plan", "whole"]


class WeightStore:
    """The weights in one pool. `config`: with its nodes and secrets. Thread-safe; close it."""

    def __init__(self, config: PoolClientConfig, namespace: str = NAMESPACE) -> None:
        self.config = config
        self.namespace = namespace
        key = reveal(config.page_key)
        self._geometry = {"weights": str(FORMAT), **({"page_key": page_key_id(key)} if key else {})}
        self.content = self._client(replace(config, **WRITE_PATIENCE), namespace)
        # the checksum that is made of a page on its way is compared with the manifest too (`is_right`)
        self._reader = self._client(replace(config, checksum=True, **PATIENCE), namespace)

    def _client(self, config: PoolClientConfig, namespace: str) -> PoolClient:
        # a page is used once: to make all of a node's memory present would take longer than to read a model
        connector = connector_for(config, "weights", populate=False)
        return PoolClient(config, namespace, self._geometry, connector=connector, page_bytes=PAGE_BYTES)

    def reader(self, model: ModelName) -> PageReader:
        """Reads pages of the model's content."""
        return PageReader(self._reader, str(model))

    def revision(self, model: ModelName) -> Revision:
        """The model's own pages, whether there are any or not. Close it."""
        return Revision(self._client(replace(self.config, **WRITE_PATIENCE), self.name_of(model)), model)

    def name_of(self, model: ModelName) -> str:
        """The namespace of a revision."""
        return f"{self.namespace}/{model}"

    def revisions(self) -> list[ModelName] | None:
        """All that the pool knows, whole or not; None where our token may not list namespaces. Raises
        PoolError.
        """
        try:
            listed = ask_pool(self.config, lambda node: node.ask(ListNamespaces, NamespaceList))
        except RequestRefused as error:
            if error.code == "access_denied":
                return None
            raise
        prefix = f"{self.namespace}/"
        names = [one.name for one in listed.namespaces if not one.dropped and one.name.startswith(prefix)]
        return sorted(parse_model(name.removeprefix(prefix)) for name in names)

    def manifest(self, model: ModelName) -> Manifest:
        """Of a whole revision. Raises WeightsError where there is none, PoolError where nobody answers."""
        known = self.revisions()
        if known is not None and model not in known:  # to look for its pages would make the namespace
            there = ", ".join(map(str, known[:8])) or "none"
            raise WeightsError(f"the pool has no model {model}: push it; there are: {there}")
        with self.revision(model) as revision:
            if (root := revision.first("whole")) is not None:
                return revision.manifest(root)
            begun = revision.first("plan") is not None
        said = "its push was not finished" if begun else "it has no first page"
        raise WeightsError(f"{model} is not whole in the pool: {said}: push it again")

    def protect(self, model: ModelName, weight: float | None, copies: int | None) -> str:
        """Make the namespaces of content and of a revision such that nothing is evicted from them. `weight`:
        their share of a busy node; None: as it is, WEIGHT for one without settings. `copies`: nodes that hold
        each page, of all weights; None: as it is. Why it was not possible; empty if it was. Raises PoolError.
        """

        def settle(node: NodeClient) -> None:
            listed = node.ask(ListNamespaces, NamespaceList).namespaces
            known = {one.name: one.settings for one in listed}
            many = copies
            for name in (self.namespace, self.name_of(model)):
                if (settings := known.get(name)) is None:
                    raise PoolRefused(f"our token may not see the settings of namespace {name}")
                many = settings.copies if many is None else many
                kept = dict.fromkeys(TOKENS, KEPT)
                share = (
                    weight if weight is not None else settings.weight if settings.policy == KEEP else WEIGHT
                )
                wanted = replace(settings, policy=KEEP, ttl_s=0.0, weight=share, copies=many, **kept)
                if wanted != replace(settings, **kept):
                    node.ask(lambda i, name=name, wanted=wanted: PutNamespace(i, name, wanted), Done)  # type: ignore[misc]

        try:
            ask_pool(self.config, settle)
        except PoolRefused as error:
            return str(error)
        return ""

    def open(self) -> None:
        """Make the namespace of content known. Raises PoolError where that is refused."""
        _open(self.content)

    def close(self) -> None:
        self.content.close()
        self._reader.close()

    def __enter__(self) -> WeightStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Revision:
    """The pages of a revision's own namespace."""

    def __init__(self, client: PoolClient, model: ModelName) -> None:
        self._client = client
        self._model = model

    def open(self) -> None:
        """Make the namespace known. Raises PoolError where that is refused, or no node answers."""
        _open(self._client)

    def first(self, which: First) -> Root | None:
        """One of the two first pages. None: it is not there. Raises WeightsError, PoolError."""
        page = np.zeros(ROOT_BYTES, np.uint8)
        if self._client.get([fixed_key(which)], [[page]]) == [True]:
            return decode_root(page.tobytes(), self._model)
        for error in self._client.check().values():
            if error is not None:
                raise error
        return None

    def manifest(self, root: Root) -> Manifest:
        """Raises WeightsError, also where its pages are lost."""
        data = np.empty(root.manifest_bytes, np.uint8)
        reader = PageReader(self._client, str(self._model))
        into, start = [], 0
        for piece in root.pieces:
            into.append(data[start : start + piece.length])
            start += piece.length
        reader.read("its manifest", root.pieces, into)
        return decode_manifest(data.data, root, self._model)

    def write_manifest(self, data: bytes, root: Root) -> None:
        """Store the manifest's pages. `root`: of `data`. Raises WeightsError."""
        for piece, page in cut_bytes(data):
            self._put(piece.key, page)
        if lost := missing_of(self._client, [piece.key for piece in root.pieces]):
            raise WeightsError(
                f"{self._model}: {len(lost)} pages of its manifest were not stored: push it again"
            )

    def write_first(self, which: First, root: Root) -> None:
        """Raises WeightsError, also where another push was first."""
        page = np.frombuffer(encode_root(root), np.uint8)
        self._put(fixed_key(which), page)
        if self.first(which) != root:
            raise WeightsError(
                f"{self._model} was pushed from other files meanwhile: a revision never changes, so push "
                "yours under another one"
            )

    def _put(self, key: bytes, page: Bytes1D) -> None:
        if self._client.put([key], [[page]]) != [True]:
            full = self._client.counters.pages_refused
            why = "the pool is full" if full else "a node did not take a page"
            raise WeightsError(f"{self._model} was not stored: {why}: free memory, and push it again")
        await_written(self._client, [key])

    def close(self) -> None:
        self._client.close()

    def __enter__(self) -> Revision:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _open(client: PoolClient) -> None:
    """Raises PoolError where the node refuses the namespace, or does not answer."""
    for error in client.check().values():
        if error is not None:
            raise error


def await_written(client: PoolClient, keys: Sequence[bytes]) -> None:
    """Wait until these pages are there, which another push may be writing: for at most WRITTEN_S, and only
    while a node is up.
    """
    until_s = time.monotonic() + WRITTEN_S
    while not all(client.exists(keys)) and time.monotonic() < until_s:
        if not client.is_up:
            return
        time.sleep(POLL_S)


def missing_of(client: PoolClient, keys: Sequence[bytes]) -> list[bytes]:
    """The pages that are not there, each once."""
    missing = _missing(client, list(dict.fromkeys(keys)))
    return _missing(client, missing) if missing else []  # a node that failed is another's business by now


def _missing(client: PoolClient, keys: Sequence[bytes]) -> list[bytes]:
    return [key for key, there in zip(keys, client.exists(keys), strict=True) if not there]
