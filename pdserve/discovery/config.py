"""Configuration of etcd: where it is, and who we are there."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from pdserve.security.tokens import Secret


class EtcdConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where etcd is. Keys are under `/pdserve/<cluster>/`."""

    endpoints: Annotated[
        list[str], Meta(description="etcd's client URLs, e.g. `http://10.0.0.1:2379`; tried in order.")
    ] = []
    username: Annotated[str, Meta(description="User name in etcd, if etcd requires one.")] = ""
    password: Annotated[Secret, Meta(description="The user's password; also from PDSERVE_ETCD_PASSWORD.")] = (
        Secret("")
    )
    ca_file: Annotated[
        str, Meta(description="CA certificates that verify https endpoints; empty: the system's.")
    ] = ""
    certificate_file: Annotated[
        str, Meta(description="Our certificate, for an etcd that asks clients for one; empty: none.")
    ] = ""
    key_file: Annotated[str, Meta(description="The key of certificate_file; empty: in the same file.")] = ""
