"""The TOML file that the containers of a group read, and the secrets that it names. Pure.

What differs between the pods of a group (name, address) goes to their command lines. Secrets are files of one
Secret; a secret that stands in the cluster file is refused, because what is rendered goes into repositories.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Final

from pdserve.errors import ConfigError
from pdserve.render.kubernetes.groups import Cluster, Group
from pdserve.up.config import WORKER_ROLES, Table

SECRETS_DIR: Final = "/etc/pdserve/secrets"
MODELS_DIR: Final = "/models"
SECRET_KEYS: Final = frozenset(
    {
        "token",
        "cluster_token",
        "admin_token",
        "read_token",
        "write_token",
        "metrics_token",
        "page_key",
        "password",
    }
)
TLS_KEYS: Final = frozenset({"certificate", "key", "ca", "client_ca"})
OF_THE_POD: Final = frozenset({"kubernetes"})
"""Tables whose files Kubernetes itself gives to the pod."""


@dataclass(frozen=True)
class Content:
    """A group's configuration in its container."""

    tables: Table
    secrets: tuple[tuple[str, str], ...]
    """(name in the Secret, file of the person who renders), in order of the names."""
    admin_token: str = ""
    """Of a pool node: the file in the container that opens it to `pdserve pool drain`."""


def content_of(cluster: Cluster, group: Group) -> Content:
    """Raises ConfigError: a secret in plain text, two files of one name, a router that lets everybody in."""
    tables = _copy(group.first.config)
    if group.role == "router":
        _prepare_router(cluster, tables)
    elif group.role == "pool":
        tables.pop("name")
        tables["cluster"].pop("advertise")
    else:
        tables.pop("advertise")
        _place_model(group, tables["engine"])
    has_tokens = any(not one.first.config.get("insecure") for one in cluster.of("pool"))
    _require_secrets(group, tables, has_tokens)
    found: dict[str, str] = {}
    for where, table, key in list(_secrets(tables, group.first.table)):
        path = table[key]
        name = PurePath(path).name
        if found.setdefault(name, path) != path:
            raise ConfigError(f"'{where}': two files named {name}: a Secret holds one of each name")
        table[key] = f"{SECRETS_DIR}/{name}"
    return Content(tables, tuple(sorted(found.items())), str(tables.get("admin_token_file") or ""))


def _prepare_router(cluster: Cluster, tables: Table) -> None:
    own = {spec.config["advertise"] for group in cluster.workers for spec in group.specs}
    if not tables.get("etcd", {}).get("endpoints"):
        for role in WORKER_ROLES:  # found by their pods; those outside of the file stay
            tables[role] = [url for url in tables.get(role, ()) if url not in own]
    if not tables.get("insecure") and not tables.get("access", {}).get("keys_file"):
        raise ConfigError(
            "'router.access.keys_file' is needed: in Kubernetes others reach the router (or insecure = true)"
        )


def _place_model(group: Group, engine: Table) -> None:
    """Relative paths lie in the volume of models, under their last part."""
    path = PurePath(str(engine.get("model_path", "")))
    if not path.is_absolute():
        engine["model_path"] = f"{MODELS_DIR}/{path.name}"
    elif not path.is_relative_to(MODELS_DIR):
        raise ConfigError(f"{group.name}: model_path must be relative or in {MODELS_DIR}, found {path}")


def _require_secrets(group: Group, tables: Table, has_tokens: bool) -> None:
    """Files of secrets that a process on a network needs, where the cluster file names none. `has_tokens`:
    the pool asks for tokens.
    """
    if group.role == "pool":
        if not tables.get("insecure"):
            _need(tables, "admin_token", "pool-admin-token")
            _need(tables["cluster"], "token", "pool-cluster-token")
            _need(tables.setdefault("namespace_defaults", {}), "read_token", "pool-token")
        return
    if group.role == "router":
        _need(tables.setdefault("access", {}), "cluster_token", "cluster-token")
        _need(tables["admin"], "key", "admin-key")
        return
    if not tables.get("insecure"):
        _need(tables, "cluster_token", "cluster-token")
    if has_tokens:
        _need(tables.setdefault("pool", {}), "token", "pool-token")


def _need(table: Table, key: str, name: str) -> None:
    if not table.get(key) and not table.get(f"{key}_file"):
        table[f"{key}_file"] = f"{SECRETS_DIR}/{name}"


def _secrets(table: Any, where: str) -> Iterator[tuple[str, Table, str]]:
    """(place, table, key) of each file of secrets. Raises ConfigError for one in plain text."""
    if isinstance(table, list):
        for i, entry in enumerate(table):
            yield from _secrets(entry, f"{where}[{i}]")
    if not isinstance(table, dict):
        return
    is_tls, is_admin = where.endswith(".tls"), where.endswith(".admin")
    for key, value in table.items():
        at = f"{where}.{key}"
        if key in OF_THE_POD:
            continue
        if isinstance(value, dict | list):
            yield from _secrets(value, at)
        elif not isinstance(value, str) or not value:
            continue
        elif key in SECRET_KEYS or (key == "key" and is_admin):
            raise ConfigError(
                f"'{at}' is a secret in plain text: give {key}_file, so that it is in no manifest"
            )
        elif key.endswith("_file") or (is_tls and key in TLS_KEYS):
            yield at, table, key


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copy(inner) for key, inner in value.items()}
    return [_copy(inner) for inner in value] if isinstance(value, list | tuple) else value
