"""Namespaces in a node's configuration: `[[namespaces]]` and `[namespace_defaults]`."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from pdserve.errors import ConfigError
from pdserve.kvpool.protocol.cluster_messages import Media, NamespaceSettings
from pdserve.security.tokens import MIN_CHARS, Secret, digest_of_setting, given_secret, is_digest
from pdserve.sizes import parse_bytes


class NamespaceDefaults(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a namespace may do on each node."""

    media: Annotated[
        Media,
        Meta(description="Media of its pages; `dram+ssd`: memory, and the tiers below it for cold pages."),
    ] = "dram+ssd"
    policy: Annotated[
        str,
        Meta(
            description="Order of eviction: lru, lfu, fifo, arc or ttl; keep: nothing is evicted, and writes "
            "beyond the memory are refused."
        ),
    ] = "lru"
    ttl_s: Annotated[
        float,
        Meta(
            ge=0,
            description="Lifetime of a page after its write; such pages are not written to tiers. 0: "
            "unlimited.",
        ),
    ] = 0.0
    quota_bytes: Annotated[
        int | str,
        Meta(
            description="Most memory on each node, including pages that are being written, like `4GiB`; "
            "0: no limit."
        ),
    ] = 0
    tier_quota_bytes: Annotated[
        int | str, Meta(description="Most bytes in the tiers on each node, like `4GiB`; 0: no limit.")
    ] = 0
    operations_s: Annotated[
        float,
        Meta(ge=0, description="Keys requested per second on each node; further requests wait. 0: no limit."),
    ] = 0.0
    bytes_s: Annotated[
        int | str,
        Meta(description="Bytes read and written per second on each node, like `2GB`; 0: no limit."),
    ] = 0
    weight: Annotated[
        float, Meta(gt=0, description="Share of a busy node, relative to the weights of other namespaces.")
    ] = 1.0
    copies: Annotated[
        int,
        Meta(
            ge=1,
            le=16,
            description="Nodes that hold each page. With 2 or more the namespace survives the loss of a "
            "node's memory, and takes so much more.",
        ),
    ] = 1
    read_token: Annotated[
        Secret, Meta(description="Token required to read: plain, or `sha256:` and its digest; empty: none.")
    ] = Secret("")
    write_token: Annotated[
        Secret, Meta(description="Token required to write; it permits reading too. Empty: as read_token.")
    ] = Secret("")
    admin_token: Annotated[
        Secret,
        Meta(
            description="Token required to clear, drop, replace or change the namespace. Empty: as "
            "write_token."
        ),
    ] = Secret("")


class NamespaceConfig(NamespaceDefaults, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A namespace that the node makes at its start."""

    name: Annotated[
        str, Meta(min_length=1, max_length=512, description="Name of the namespace, as workers request it.")
    ]


def settings_of(config: NamespaceDefaults) -> NamespaceSettings:
    """As the nodes know them: sizes as numbers, tokens as digests. Reads the token files. Raises
    ConfigError.
    """
    label = f"namespace '{config.name}'" if isinstance(config, NamespaceConfig) else "namespace_defaults"
    try:
        return NamespaceSettings(
            media=config.media,
            policy=config.policy,
            ttl_s=config.ttl_s,
            quota_bytes=parse_bytes(config.quota_bytes),
            tier_quota_bytes=parse_bytes(config.tier_quota_bytes),
            operations_s=config.operations_s,
            bytes_s=float(parse_bytes(config.bytes_s)),
            weight=config.weight,
            copies=config.copies,
            read_token=token_digest("read_token", config.read_token),
            write_token=token_digest("write_token", config.write_token),
            admin_token=token_digest("admin_token", config.admin_token),
        )
    except ValueError as error:
        raise ConfigError(f"{label}: {error}") from None
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
