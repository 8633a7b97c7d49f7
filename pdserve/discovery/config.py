"""Configuration of etcd: where it is, and who we are there."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from pdserve.security.tokens import Secret

WORKERS = "workers"
"""The kind of the keys of workers."""


class EtcdConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where etcd is. Keys are under `/pdserve/<cluster>/`."""

    endpoints: list[str] = []
    """etcd's client URLs, e.g. `http://10.0.0.1:2379`; tried in order."""
    username: str = ""
    """User name in etcd, if etcd requires one."""
    password: Secret = Secret("")
    """The user's password; also from PDSERVE_ETCD_PASSWORD."""
    ca_file: str = ""
    """CA certificates that verify https endpoints; empty: the system's."""
    certificate_file: str = ""
    """Our certificate, for an etcd that asks clients for one; empty: none."""
    key_file: str = ""
    """The key of certificate_file; empty: in the same file."""


class WorkerEtcdConfig(EtcdConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where workers and routers meet; without endpoints they do not."""

    cluster: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")] = "pool"
    """Name of the group of workers: routers find the workers with the same name."""
