"""Which client may do what. Pure; tokens are SHA-256 hex digests here.

A namespace may have a token to read, a token to write and a token to administer. The right to write includes
reading; the right to administer includes both. A right without a token of its own needs the token of the
right below it. So no right is more open than a right that it includes: with a write token alone, every client
reads, and a client with the token writes and administers. A namespace without tokens is open to all. On a
node with an `admin_token` only its holder makes one: a stranger would take a worker's name, or fill the list.

The right to administer is to clear, drop and replace a namespace, and to change its tokens. Its limits
(quota, rates, weight, policy, copies, media) are of a node that others use too: changing them needs the
node's right.

The node's `admin_token` allows operations on the node and on all namespaces. Without one, operations on the
node are open, and no namespace can have tokens: any client could pass for a node of the pool, and nodes read
everything. Nodes show the `cluster_token` to each other.
"""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

import msgspec

from pdserve.kvpool.protocol import messages as m
from pdserve.kvpool.protocol.cluster_messages import (
    Drain,
    Gossip,
    ListPages,
    NamespaceSettings,
    ProbePeer,
    PutNamespace,
    ReplaceNamespace,
    Upgrade,
)
from pdserve.kvpool.protocol.messages import ADMIN, READ, WRITE
from pdserve.security.tokens import same

RIGHTS: Final = {READ: "read", WRITE: "write", ADMIN: "admin"}

TOKENS: Final = ("read_token", "write_token", "admin_token")
KEPT: Final = "set"  # instead of a digest; in a list: there is a token; in a change: leave it as it is

Scope: TypeAlias = Literal["namespace", "name", "node", "pool"]
NEEDED: Final[dict[type, tuple[Scope, int]]] = {
    m.Exists: ("namespace", READ),
    m.Wait: ("namespace", READ),
    m.Get: ("namespace", READ),
    m.Reserve: ("namespace", WRITE),
    m.Discard: ("namespace", WRITE),
    m.Clear: ("namespace", ADMIN),
    m.Erase: ("namespace", ADMIN),
    m.DropNamespace: ("name", ADMIN),
    PutNamespace: ("name", ADMIN),
    ReplaceNamespace: ("name", ADMIN),
    Drain: ("node", ADMIN),
    Upgrade: ("node", ADMIN),
    ListPages: ("node", ADMIN),
    Gossip: ("pool", ADMIN),
    ProbePeer: ("pool", ADMIN),
}
"""The right that a request needs, and where: in the namespace whose number or name it has, as the node's
administrator, or as a node of this pool. Others need none, or are judged by what they find.
"""


def guards(settings: NamespaceSettings) -> tuple[str, str, str]:
    """The digests needed to read, write and administer; empty: open to all."""
    write = settings.write_token or settings.read_token
    return settings.read_token, write, settings.admin_token or write


def is_guarded(settings: NamespaceSettings) -> bool:
    return any(guards(settings))


def rights_of(presented: str, settings: NamespaceSettings) -> int:
    """The rights of a client with this digest in a namespace."""
    read, write, admin = guards(settings)
    is_admin = same(presented, admin)
    is_writer = is_admin or same(presented, write)
    is_reader = is_writer or same(presented, read)
    return (
        (ADMIN if is_admin or not admin else 0)
        | (WRITE if is_writer or not write else 0)
        | (READ if is_reader or not read else 0)
    )


def redacted(settings: NamespaceSettings) -> NamespaceSettings:
    """The settings as a client may see them: KEPT instead of each token."""
    if not is_guarded(settings):
        return settings
    return msgspec.structs.replace(
        settings, **{name: KEPT if getattr(settings, name) else "" for name in TOKENS}
    )


def denied(namespace: str, right: int, request_id: int) -> m.Fault:
    """The answer to a client without the right in a namespace that it knows of. `namespace`: how it does."""
    message = (
        f"namespace {namespace}: this client may not {_VERBS[right]}: give it the namespace's "
        f"{RIGHTS[right]} token {_WHERE}"
    )
    return m.Fault(request_id, "access_denied", message)


_VERBS: Final = {READ: "read it", WRITE: "write to it", ADMIN: "administer it"}
_WHERE: Final = "(a worker: pool.token_file; pdserve pool: --token-file; both: PDSERVE_POOL_TOKEN)"


def denied_open(namespace: str, request_id: int) -> m.Fault:
    """The answer to a client that may not open this name, the same whether it is there: names tell of models
    and tenants.
    """
    message = (
        f"namespace '{namespace}' is not there, or not for this client: give it the namespace's read token "
        f"{_WHERE}; a new one is made by `pdserve pool ns create`, or by workers with "
        "namespace_defaults.write_token"
    )
    return m.Fault(request_id, "access_denied", message)


def denied_change(namespace: str, request_id: int) -> m.Fault:
    """The answer to a client that may not make, change or drop this name, the same whether it is there."""
    message = (
        f"namespace '{namespace}' is not there, or this client may not administer it: give it the "
        f"namespace's admin token {_WHERE}; to make a new one, the nodes' admin token"
    )
    return m.Fault(request_id, "access_denied", message)


def denied_first(namespace: str, request_id: int) -> m.Fault:
    """The answer to a client that would decide a namespace's geometry, and may only read."""
    message = (
        f"namespace '{namespace}': no worker that may write has opened it yet, and this client may only "
        "read: start a worker with the write token first"
    )
    return m.Fault(request_id, "access_denied", message)


def denied_here(node: str, what: str, request_id: int) -> m.Fault:
    """The answer to a client that is not the node's administrator."""
    message = (
        f"node {node}: {what} needs the node's admin token: give it with --token-file or PDSERVE_POOL_TOKEN "
        "(the node's configuration sets it: admin_token)"
    )
    return m.Fault(request_id, "access_denied", message)


def denied_peer(node: str, request_id: int) -> m.Fault:
    """The answer to a client that is no node of this pool."""
    message = f"node {node}: that is for nodes of this pool: give them all the same cluster_token"
    return m.Fault(request_id, "access_denied", message)
