"""`pdserve pool ns`: the namespaces of the pool. What is changed on one node, all nodes are told by it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Final, TypeAlias

import typer
from msgspec.structs import asdict, replace

from pdserve.errors import ConfigError, PoolError, PoolRefused
from pdserve.kvpool.admin.node_client import (
    TIMEOUT_S,
    Address,
    Asking,
    NodeClient,
    Timeout,
    TlsCa,
    TlsCertificate,
    TlsKey,
    TokenFile,
    asks,
    chosen_tls,
    chosen_token,
)
from pdserve.kvpool.admin.tables import as_json, complain, make_console, make_table, rate, size
from pdserve.kvpool.namespaces.access import TOKENS
from pdserve.kvpool.protocol.cluster_messages import (
    ListNamespaces,
    NamespaceList,
    NamespaceRecord,
    NamespaceSettings,
    PutNamespace,
    ReplaceNamespace,
)
from pdserve.kvpool.protocol.messages import Done, DropNamespace, NamespaceStatus
from pdserve.security.tokens import MIN_CHARS, digest_of_setting, is_digest
from pdserve.sizes import parse_bytes

POLL_S: Final = 0.05

Name: TypeAlias = Annotated[str, typer.Argument(help="Name of the namespace.")]
Media: TypeAlias = Annotated[
    str | None, typer.Option(metavar="dram|ssd|dram+ssd", help="Media of its pages.")
]
Policy: TypeAlias = Annotated[str | None, typer.Option(help="Order of eviction.")]
Ttl: TypeAlias = Annotated[
    float | None,
    typer.Option("--ttl", metavar="SECONDS", help="Lifetime of a page after its write; 0: unlimited."),
]
Quota: TypeAlias = Annotated[
    str | None, typer.Option(metavar="SIZE", help="Most memory on each node, like 4GiB; 0: no limit.")
]
TierQuota: TypeAlias = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="Most bytes in the tiers on each node, like 4GiB; 0: no limit."),
]
Operations: TypeAlias = Annotated[
    float | None, typer.Option(metavar="PER_S", help="Keys requested per second on each node; 0: no limit.")
]
Bytes: TypeAlias = Annotated[
    str | None, typer.Option("--bytes", metavar="SIZE", help="Bytes per second on each node; 0: no limit.")
]
Weight: TypeAlias = Annotated[float | None, typer.Option(help="Share of a busy node.")]
Copies: TypeAlias = Annotated[int | None, typer.Option(help="Nodes that hold each page.")]
ReadToken: TypeAlias = Annotated[
    str | None, typer.Option(help='Token required to read: @FILE or sha256:DIGEST; "" removes it.')
]
WriteToken: TypeAlias = Annotated[
    str | None, typer.Option(help="Token required to write; it permits reading too.")
]
AdminToken: TypeAlias = Annotated[
    str | None, typer.Option(help="Token required to change, clear and drop the namespace.")
]
Command: TypeAlias = Callable[..., None]

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="List, make, change, drop and replace namespaces.",
)


@app.command("list")
@asks
def list_(
    asking: Asking,
    everything: Annotated[
        bool, typer.Option("--all", help="Show dropped and replaced namespaces too.")
    ] = False,
) -> None:
    """List the pool's namespaces, what each may do, and what it holds on this node."""
    with asking.node() as node:
        records = [record for record in _records(node) if everything or not record.dropped]
        report = node.status()
    held = {namespace.name: namespace for namespace in report.namespaces}
    if asking.json:
        for record in records:
            here = held.get(record.name)
            used = {"pages": here.pages, "slot_bytes": here.slot_bytes} if here else {}
            typer.echo(as_json({**asdict(record), **used}))
        return
    headings = (
        "name",
        "tokens",
        "media",
        "policy",
        "pages",
        "memory",
        "quota",
        "keys/s",
        "bytes/s",
        "weight",
    )
    table = make_table(f"namespaces of {report.node}", *headings, left=4)
    for record in records:
        table.add_row(*_row(record, held.get(record.name)))
    make_console().print(table if records else "no namespaces")


def _settings_command(start_from: Callable[[str, NamespaceRecord | None], NamespaceSettings]) -> Command:
    """A command that puts a namespace with the settings given over those of `start_from`, which is given the
    name and what is known of it, and may refuse.
    """

    def command(
        address: Address,
        name: Name,
        media: Media = None,
        policy: Policy = None,
        ttl: Ttl = None,
        quota: Quota = None,
        tier_quota: TierQuota = None,
        operations: Operations = None,
        bytes_: Bytes = None,
        weight: Weight = None,
        copies: Copies = None,
        read_token: ReadToken = None,
        write_token: WriteToken = None,
        admin_token: AdminToken = None,
        token_file: TokenFile = None,
        timeout: Timeout = TIMEOUT_S,
        tls_ca: TlsCa = None,
        tls_certificate: TlsCertificate = None,
        tls_key: TlsKey = None,
    ) -> None:
        given = _given(media, policy, ttl, quota, tier_quota, operations, bytes_, weight, copies)
        given |= _tokens(read_token, write_token, admin_token)
        tls = chosen_tls(tls_ca, tls_certificate, tls_key)
        with NodeClient(address, chosen_token(token_file), timeout, tls) as node:
            settings = replace(start_from(name, _find(node, name)), **given)
            node.ask(lambda i: PutNamespace(i, name, settings), Done)

    return command


def _create(name: str, known: NamespaceRecord | None) -> NamespaceSettings:
    if known is not None and not known.dropped:
        raise PoolRefused(f"namespace '{name}' is there already: `pdserve pool ns set` changes it")
    return NamespaceSettings() if known is None else known.settings


def _change(name: str, known: NamespaceRecord | None) -> NamespaceSettings:
    if known is None or known.dropped:
        raise PoolRefused(f"no namespace '{name}' is there: `pdserve pool ns create` makes it")
    return known.settings


app.command("create", help="Make a namespace, or bring a dropped or replaced one back, empty.")(
    _settings_command(_create)
)
app.command("set", help="Change what is given, and leave the rest.")(_settings_command(_change))


@app.command()
@asks
def drop(
    asking: Asking,
    name: Name,
) -> None:
    """Drop a namespace and all of its pages, on all nodes. A client that opens it again finds it empty."""
    with asking.node() as node:
        known = _find(node, name)
        if known is None:
            raise PoolRefused(f"no namespace '{name}' is there")
        # dropped before, too: the node may not have been able to write that down
        pages = node.ask(lambda i: DropNamespace(i, name), Done).count
    if known.dropped:
        known = replace(known, version=known.version - 1)  # nothing newer will come
    _tell(asking, known, {"dropped": name, "pages": pages})


@app.command()
@asks
def switch(
    asking: Asking,
    old: Annotated[str, typer.Argument(help="The revision to drop permanently.")],
    new: Annotated[str, typer.Argument(help="The revision that replaces it and takes over its settings.")],
) -> None:
    """Replace a revision by a new one: its space is free at once, and whoever opens it is told."""
    with asking.node() as node:
        pages = node.ask(lambda i: ReplaceNamespace(i, old, new), Done).count
        known = _find(node, old)
    assert known is not None, "it was there a moment ago"
    before = replace(known, version=known.version - 1)
    _tell(asking, before, {"dropped": old, "replaced_by": new, "pages": pages})


# --- what they share


def _records(node: NodeClient) -> list[NamespaceRecord]:
    return node.ask(ListNamespaces, NamespaceList).namespaces


def _find(node: NodeClient, name: str) -> NamespaceRecord | None:
    return next((record for record in _records(node) if record.name == name), None)


def _tell(asking: Asking, before: NamespaceRecord, what: dict[str, Any]) -> None:
    """Wait until every node knows a record newer than `before`, and name the nodes that do not."""
    late = _behind(asking, before)
    if asking.json:
        typer.echo(as_json({**what, "nodes_behind": sorted(late)}))
        return
    instead = f", replaced by {what['replaced_by']}" if "replaced_by" in what else ""
    make_console().print(f"dropped {what['dropped']}{instead}: {what['pages']:,} pages on this node")
    for node, reason in sorted(late.items()):
        complain(f"node {node} does not know it yet, and will when it can: {reason}")


def _behind(asking: Asking, before: NamespaceRecord) -> dict[str, str]:
    """The nodes that have not heard of a newer record within the time, and why."""
    deadline_s = time.monotonic() + asking.timeout_s
    late = {node.node: (node.address, "it has not been told") for node in asking.all_nodes()}
    while late:
        for name, (where, _) in list(late.items()):
            try:
                left_s = max(0.1, deadline_s - time.monotonic())
                with NodeClient(where, asking.token, left_s, asking.tls) as node:
                    found = _find(node, before.name)
            except PoolError as error:
                late[name] = (where, str(error))
                continue
            if found is None or found.version > before.version:
                del late[name]
        if not late or time.monotonic() >= deadline_s:
            break
        time.sleep(POLL_S)
    return {name: reason for name, (_, reason) in late.items()}


def _given(
    media: str | None,
    policy: str | None,
    ttl_s: float | None,
    quota: str | None,
    tier_quota: str | None,
    operations_s: float | None,
    bytes_: str | None,
    weight: float | None,
    copies: int | None,
) -> dict[str, Any]:
    """The settings that were given. Raises ConfigError."""
    if media not in (None, "dram", "ssd", "dram+ssd"):
        raise ConfigError(f"--media: {media!r} is none of dram, ssd, dram+ssd")
    sizes = {"quota_bytes": quota, "tier_quota_bytes": tier_quota, "bytes_s": bytes_}
    try:
        parsed = {name: parse_bytes(text) for name, text in sizes.items() if text is not None}
    except ValueError as error:
        raise ConfigError(str(error)) from None
    plain = {
        "media": media,
        "policy": policy,
        "ttl_s": ttl_s,
        "operations_s": operations_s,
        "weight": weight,
        "copies": copies,
    }
    return parsed | {name: value for name, value in plain.items() if value is not None}


def _tokens(*given: str | None) -> dict[str, str]:
    """Digests of the tokens that were given. Raises ConfigError."""
    found = {}
    for name, text in zip(TOKENS, given, strict=True):
        if text is None:
            continue
        option = name.replace("_", "-")
        if text and not text.startswith(("@", "sha256:")):
            raise ConfigError(f"--{option}: every user of this host sees command lines: give it as @FILE")
        token = chosen_token(Path(text[1:])) if text.startswith("@") else text
        if text.startswith("@") and 0 < len(token) < MIN_CHARS and not token.startswith("sha256:"):
            raise ConfigError(
                f"--{option}: a token has {MIN_CHARS} characters or more; `pdserve key` makes one"
            )
        found[name] = digest_of_setting(token)
        if text and not is_digest(found[name]):
            raise ConfigError(
                f"--{option}: the file is empty, or after sha256: come no 64 hexadecimal digits"
            )
    return found


def _row(record: NamespaceRecord, here: NamespaceStatus | None) -> tuple[str, ...]:
    settings = record.settings
    tokens = " ".join(name.removesuffix("_token") for name in TOKENS if getattr(settings, name))
    name = record.name
    if record.dropped:
        name += f" (replaced by {record.replaced_by})" if record.replaced_by else " (dropped)"
    policy = f"{settings.policy}, {settings.ttl_s:g} s" if settings.ttl_s else settings.policy
    return (
        name,
        tokens or "-",
        settings.media,
        policy,
        f"{here.pages:,}" if here else "-",
        size(here.slot_bytes) if here else "-",
        size(settings.quota_bytes) if settings.quota_bytes else "-",
        rate(settings.operations_s) if settings.operations_s else "-",
        size(settings.bytes_s) if settings.bytes_s else "-",
        f"{settings.weight:g}",
    )
