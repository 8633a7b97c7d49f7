"""Namespaces in a node's configuration: `[[namespaces]]` and `[namespace_defaults]`."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from pdserve.errors import ConfigError
from pdserve.kvpool.namespaces.access import TOKENS
from pdserve.kvpool.protocol.cluster_messages import NamespaceSettings
from pdserve.security.tokens import MIN_CHARS, Secret, digest_of_setting, given_secret, is_digest


class NamespaceDefaults(NamespaceSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a namespace may do on each node, with its tokens as the file gives them."""

    read_token: Secret = Secret("")
    """Token required to read: plain, or `sha256:` and its digest; empty: none."""
    write_token: Secret = Secret("")
    """Token required to write; it permits reading too. Empty: as read_token."""
    admin_token: Secret = Secret("")
    """Token required to clear, drop, replace or change the namespace. Empty: as write_token."""


class NamespaceConfig(NamespaceDefaults, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A namespace that the node makes at its start."""

    name: Annotated[str, Meta(min_length=1, max_length=512)]
    """Name of the namespace, as workers request it."""


def settings_of(config: NamespaceDefaults) -> NamespaceSettings:
    """As the nodes know them: tokens as digests. Reads the token files. Raises ConfigError."""
    label = f"namespace '{config.name}'" if isinstance(config, NamespaceConfig) else "namespace_defaults"
    given = {name: getattr(config, name) for name in NamespaceSettings.__struct_fields__}
    try:
        return NamespaceSettings(**given | {name: token_digest(name, given[name]) for name in TOKENS})
    except ConfigError as error:
        raise ConfigError(f"{label}: {error}") from None


def token_digest(name: str, given: Secret) -> str:
    """The digest of a token given as text or in a file; empty for none. Raises ConfigError."""
    token = given_secret(given, "", {})
    if 0 < len(token) < MIN_CHARS and not token.startswith("sha256:"):
        raise ConfigError(f"{name} must be {MIN_CHARS} characters or more; `pdserve key` makes one")
    found = digest_of_setting(token)
    if found and not is_digest(found):
        raise ConfigError(f"{name}: after `sha256:` must come 64 hexadecimal digits")
    return found
