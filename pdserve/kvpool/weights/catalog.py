"""What the pool has of models: listed, looked at, read once ahead of its use, and removed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from pdserve.errors import PoolError, PoolRefused, WeightsError
from pdserve.kvpool.admin.ls import pages
from pdserve.kvpool.admin.node_client import TIMEOUT_S, NodeClient, in_parallel
from pdserve.kvpool.protocol.messages import Done, DropNamespace, NodeAddress
from pdserve.kvpool.protocol.page_bytes import aligned
from pdserve.kvpool.weights.manifest import FileEntry, Manifest, Piece
from pdserve.kvpool.weights.names import ModelName
from pdserve.kvpool.weights.place import ask_pool
from pdserve.kvpool.weights.store import WeightStore, missing_of
from pdserve.kvpool.weights.streaming import BATCH_BYTES
from pdserve.security.tls import Certificates
from pdserve.security.tokens import reveal


@dataclass(frozen=True)
class Entry:
    """A revision in the pool. `state`: whole, or what is wrong. `manifest`: None where it cannot be read."""

    model: ModelName
    state: str
    manifest: Manifest | None = None
    own_bytes: int = 0
    """Of pages that no other revision has."""
    is_unreadable: bool = False
    """It may want pages that nobody can name."""


@dataclass(frozen=True)
class Removed:
    """What a removal freed. `problem`: why pages stay that nobody uses; empty if none do."""

    pages: int
    problem: str = ""


def entries(store: WeightStore) -> list[Entry]:
    """All revisions. Raises PoolError, also where our token may not list them."""
    found = [_entry(store, model) for model in listed(store)]
    users = Counter(
        key
        for one in found
        if one.manifest is not None
        for key in {piece.key for piece in one.manifest.pieces()}
    )
    return [_with_own(one, users) for one in found]


def listed(store: WeightStore) -> list[ModelName]:
    """Raises PoolError."""
    models = store.revisions()
    if models is None:
        raise PoolRefused(
            "our token may not list what the pool has: give the nodes' admin token, or that of the "
            f"namespaces {store.namespace}/..."
        )
    return models


def _entry(store: WeightStore, model: ModelName) -> Entry:
    with store.revision(model) as revision:
        try:
            whole, begun = revision.first("whole"), revision.first("plan")
            if (root := whole or begun) is None:
                return Entry(model, "empty")
            manifest = revision.manifest(root)
        except WeightsError as error:
            return Entry(model, str(error), is_unreadable=True)
    lacking = missing_of(store.content, [piece.key for piece in manifest.pieces()])
    if whole is None:
        return Entry(model, "push not finished", manifest)
    return Entry(model, f"{len(lacking):,} pages lost: push it again" if lacking else "whole", manifest)


def _with_own(entry: Entry, users: Counter[bytes]) -> Entry:
    if entry.manifest is None:
        return entry
    own = {piece.key: piece.stored for piece in entry.manifest.pieces() if users[piece.key] == 1}
    return Entry(entry.model, entry.state, entry.manifest, sum(own.values()))


def remove(store: WeightStore, model: ModelName) -> Removed:
    """Drop a revision, and free the pages that no other one has. Raises WeightsError, PoolError."""
    models = listed(store)
    if model not in models:
        raise WeightsError(f"the pool has no model {model}: `pdserve weights ls` shows what there is")
    entry = _entry(store, model)
    name = store.name_of(model)
    ask_pool(store.config, lambda node: node.ask(lambda i: DropNamespace(i, name), Done))
    if entry.manifest is None:
        return Removed(
            0, f"{model} is gone, but its list of pages could not be read: `pdserve weights prune`"
        )
    return free(store, [piece.key for piece in entry.manifest.pieces()])


def free(store: WeightStore, keys: Iterable[bytes]) -> Removed:
    """Remove those of these pages that no revision wants, begun pushes included. Raises PoolError."""
    wanted: set[bytes] = set()
    before = set()
    for model in listed(store):
        other = _entry(store, model)
        if other.is_unreadable:
            return Removed(
                0,
                f"nothing was freed: what {model} uses cannot be read: push or remove it, then prune",
            )
        if other.manifest is not None:
            before.add(model)
            wanted |= {piece.key for piece in other.manifest.pieces()}
    unused = [key for key in dict.fromkeys(keys) if key not in wanted]
    count = store.content.remove(unused)
    if new := set(listed(store)) - before:
        return Removed(
            count, f"{min(new)} was begun meanwhile: push it again, lest pages that it shares are gone"
        )
    away = [f"{node}: {error}" for node, error in store.content.check().items() if error is not None]
    problem = (
        f"pages of nodes that do not answer stay, until `pdserve weights prune`: {away[0]}" if away else ""
    )
    return Removed(count, problem)


def prune(store: WeightStore) -> Removed:
    """Free content that no revision wants: what pushes left that were never finished, and what nodes brought
    back that were away. Raises PoolError; listing pages needs the nodes' admin token.
    """
    tls = Certificates(store.config.tls).client_context

    def keys_of(node: NodeAddress) -> list[bytes]:
        with NodeClient(node.address, reveal(store.config.token), TIMEOUT_S, tls) as client:
            return [page.key for page in pages(client, store.namespace)]

    nodes = [NodeAddress(ref.node, ref.address) for ref in store.config.nodes]
    found = in_parallel(nodes, keys_of)
    keys = [key for each in found if isinstance(each, list) for key in each]
    problems = [each for each in found if isinstance(each, PoolError)]
    if len(problems) == len(nodes):
        raise problems[0]
    removed = free(store, keys)
    return Removed(removed.pages, removed.problem or "; ".join(map(str, problems)))


def warm(store: WeightStore, model: ModelName, progress: Callable[[int, int], None]) -> Manifest:
    """Read every page of a whole revision once, and check it. Pages come up from tiers into memory by that,
    so that workers find them there. Raises WeightsError that names what is lost or damaged, PoolError.
    """
    manifest = store.manifest(model)
    reader, done = store.reader(model), 0
    for file in manifest.files:
        for batch in _batches(file):
            buffers = [aligned(piece.length) for piece in batch]
            reader.read(file.path, batch, buffers)
            done += sum(piece.length for piece in batch)
            progress(done, manifest.size_bytes)
    return manifest


def _batches(file: FileEntry) -> Iterable[Sequence[Piece]]:
    most = max(1, BATCH_BYTES // max((piece.stored for piece in file.pieces), default=1))
    return (file.pieces[start : start + most] for start in range(0, len(file.pieces), most))
