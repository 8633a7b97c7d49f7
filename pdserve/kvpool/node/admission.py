"""From a node's configuration to the rules that its state applies: token files are read, settings checked."""

from __future__ import annotations

import hmac

from pdserve.errors import ConfigError
from pdserve.kvpool.core.namespace_admin import Rules
from pdserve.kvpool.namespaces.registry import NamespaceError, check_name
from pdserve.kvpool.namespaces.validation import check_settings
from pdserve.kvpool.node.config.namespaces import settings_of, token_digest
from pdserve.kvpool.node.config.node import PoolNodeConfig
from pdserve.kvpool.protocol.messages import Hello


def rules_of(config: PoolNodeConfig) -> Rules:
    """Raises ConfigError: a quota larger than the node, an unknown policy, a token that cannot be read."""
    rules = Rules(
        admin_token=token_digest("admin_token", config.admin_token, config.admin_token_file),
        defaults=settings_of(config.namespace_defaults),
        named={namespace.name: settings_of(namespace) for namespace in config.namespaces},
    )
    tokens_allowed = bool(rules.admin_token)
    for label, name, settings in [
        ("namespace_defaults", "", rules.defaults),
        *((f"namespace '{name}'", name, settings) for name, settings in rules.named.items()),
    ]:
        try:
            if name:
                check_name(name)
            check_settings(settings, config.capacity, tokens_allowed=tokens_allowed)
        except NamespaceError as error:
            raise ConfigError(f"node {config.name}: {label}: {error}") from None
    return rules


def shows_token(hello: Hello, config: PoolNodeConfig) -> bool:
    """Whether a client presents the cluster's token, or none where the cluster has none."""
    return hmac.compare_digest(hello.token.encode(), config.cluster.token.encode())


def is_peer(hello: Hello, config: PoolNodeConfig, rules: Rules) -> bool:
    """Whether a client is a node of this pool: where tokens are in use, it must show the cluster's."""
    proves_it = bool(config.cluster.token) or not rules.admin_token
    return bool(hello.node) and proves_it and shows_token(hello, config)
