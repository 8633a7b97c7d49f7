"""`pdserve pool ns`: the namespaces of the pool. What is changed on one node, all nodes are told by it.

`pdserve pool tenants` and `pdserve pool delete`: whose pages the pool has, and their end.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Annotated, Any, Final, TypeAlias

import msgspec
import typer
from msgspec.structs import asdict, replace

from pdserve.errors import ConfigError, PoolError, PoolRefused
from pdserve.kvpool.admin.node_client import Asking, NodeClient, asks, in_parallel
from pdserve.kvpool.admin.tables import as_json, complain, make_console, make_table, rate, size
from pdserve.kvpool.namespaces.access import TOKENS
from pdserve.kvpool.namespaces.tenants import MARK, is_tenant_name, split
from pdserve.kvpool.node.config import NamespaceConfig, settings_of
from pdserve.kvpool.protocol.cluster_messages import (
    DEAD,
    ListNamespaces,
    NamespaceList,
    NamespaceRecord,
    NamespaceSettings,
    PutNamespace,
    ReplaceNamespace,
)
from pdserve.kvpool.protocol.messages import Done, DropNamespace, NamespaceStatus, NodeAddress, StatusReport
from pdserve.settings.config_file import build_config, options, parse_value

POLL_S: Final = 0.05

Name: TypeAlias = Annotated[str, typer.Argument(help="Name of the namespace.")]
Settings: TypeAlias = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="SETTING=VALUE",
        help="As in [[namespaces]] of a node's configuration: quota_bytes=4GiB, copies=2, "
        "read_token_file=/path; an empty value removes a token.",
    ),
]

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


@app.command()
@asks
def create(asking: Asking, name: Name, settings: Settings = None) -> None:
    """Make a namespace, or bring a dropped or replaced one back, empty."""
    _put(asking, name, settings or [], _create)


@app.command("set")
@asks
def set_(asking: Asking, name: Name, settings: Settings = None) -> None:
    """Change what is given, and leave the rest."""
    _put(asking, name, settings or [], _change)


def _put(
    asking: Asking,
    name: str,
    words: list[str],
    start_from: Callable[[str, NamespaceRecord | None], NamespaceSettings],
) -> None:
    """Put a namespace with the given settings over those of `start_from`, which may refuse."""
    given = _given(name, words)
    with asking.node() as node:
        settings = replace(start_from(name, _find(node, name)), **given)
        node.ask(lambda i: PutNamespace(i, name, settings), Done)


def _create(name: str, known: NamespaceRecord | None) -> NamespaceSettings:
    if known is not None and not known.dropped:
        raise PoolRefused(f"namespace '{name}' is there already: `pdserve pool ns set` changes it")
    return NamespaceSettings() if known is None else known.settings


def _change(name: str, known: NamespaceRecord | None) -> NamespaceSettings:
    if known is None or known.dropped:
        raise PoolRefused(f"no namespace '{name}' is there: `pdserve pool ns create` makes it")
    return known.settings


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


@app.command("replace")
@asks
def replace_(
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


def _given(name: str, words: list[str]) -> dict[str, Any]:
    """The settings that were given, as the nodes know them. Raises ConfigError."""
    known = {option.key: option for option in options(NamespaceConfig)}
    values: dict[str, Any] = {"name": name}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or key == "name":
            raise ConfigError(f"{word!r} is no SETTING=VALUE")
        if key in TOKENS and text and not text.startswith("sha256:"):
            raise ConfigError(
                f"{key}: every user of this host sees command lines: give it as {key}_file=FILE, or by its "
                "digest"
            )
        try:
            is_text = key in TOKENS or key not in known
            values[key] = text if is_text else parse_value(known[key].annotation, text)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{key}: {error}") from None
    found = settings_of(build_config(NamespaceConfig, values, source="settings"))
    names = {key.removesuffix("_file") for key in values} - {"name"}
    return {key: getattr(found, key) for key in names}


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


DELETE_S: Final = 4 * 70.0
"""A node answers after 64 s at most (core/durable_answers.py); it asks the others, then itself, all twice."""


@asks
def tenants(asking: Asking) -> None:
    """Show the bytes of each tenant's pages, over all models and nodes."""
    nodes = asking.all_nodes()
    reports = in_parallel(nodes, lambda node: _status(asking, node))
    found = Counter[tuple[str, str]]()
    for report in reports:
        for space in report.namespaces if isinstance(report, StatusReport) else ():
            tenant = split(space.name)[1]
            found[tenant, "memory"] += space.slot_bytes
            found[tenant, "tiers"] += space.tier_bytes
    held = {tenant: (found[tenant, "memory"], found[tenant, "tiers"]) for tenant, _ in found}
    late = {n.node: str(r) for n, r in zip(nodes, reports, strict=True) if isinstance(r, PoolError)}
    if asking.json:
        names = ("memory_bytes", "tier_bytes")
        told = {tenant: dict(zip(names, sizes, strict=True)) for tenant, sizes in held.items()}
        typer.echo(as_json({"tenants": told, "problems": late}))
    else:
        table = make_table(f"tenants, {len(nodes)} nodes", "tenant", "memory", "tiers")
        for tenant, sizes in sorted(held.items(), key=lambda one: -sum(one[1])):
            table.add_row(tenant or "(nobody)", *map(size, sizes))
        make_console().print(table)
    for node, problem in late.items():
        complain(f"node {node} is left out: {problem}")


@asks
def delete(
    asking: Asking,
    tenant: Annotated[str, typer.Option("--tenant", help="Whose pages; its name, or that of its cache.")],
) -> None:
    """Erase a tenant's pages of all models in memory and tiers of all nodes, and wait for the end of it."""
    if not is_tenant_name(tenant):
        raise ConfigError(f"--tenant: no tenant can be called {tenant!r}")
    with asking.node() as node:
        pages = node.ask(lambda i: DropNamespace(i, MARK + tenant), Done, DELETE_S).count
        away = [member.node for member in node.status().members if member.status == DEAD]
    if asking.json:
        typer.echo(as_json({"tenant": tenant, "pages": pages, "away": away}))
    else:
        make_console().print(f"erased {pages:,} pages of {tenant}")
    for name in away:
        complain(f"node {name} is away: it erases them when it returns")
    if away:
        raise typer.Exit(1)


def _status(asking: Asking, node: NodeAddress) -> StatusReport:
    with asking.node(node.address) as client:
        return client.status()
