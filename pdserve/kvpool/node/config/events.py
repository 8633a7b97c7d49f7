"""Configuration of the events that a node publishes of its pages."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from pdserve.kvpool.protocol.kv_events import EventFormat

LOOPBACK_HOSTS = frozenset({"127.0.0.1", "::1", "localhost"})


class EventsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Events of stored and removed pages over ZeroMQ, for routers of other stacks."""

    address: str = ""
    """ZeroMQ address of the events, like `tcp://127.0.0.1:5557` or `ipc:///run/a/b`; empty: no events.
    Whoever reaches it reads them, without a token.
    """
    format: EventFormat = "blocks"
    """blocks: events of SGLang and vLLM; objects: those of Mooncake, which Dynamo's KV router reads."""
    topic: Annotated[str, Meta(max_length=256)] = ""
    """Topic of each batch; llm-d wants `kv@POD@MODEL`."""
    namespaces: list[str] = []
    """Namespaces whose pages are told; empty: all that have no tokens."""
    trusted_network: bool = False
    """Publish to other hosts. Everyone who reaches the ports learns which prompts were served, if he guesses
    them.
    """

    def __post_init__(self) -> None:
        if self.address:
            _check("events.address", self.address, self.trusted_network)


def _check(name: str, address: str, trusted: bool) -> None:
    """Raises ValueError."""
    parts = urlsplit(address)
    try:
        is_address = parts.scheme == "ipc" or (parts.scheme == "tcp" and bool(parts.hostname and parts.port))
    except ValueError:  # of the port
        is_address = False
    if not is_address:
        raise ValueError(f"{name} must be like tcp://127.0.0.1:5557 or ipc:///run/a/b, found {address!r}")
    if parts.scheme == "tcp" and parts.hostname not in LOOPBACK_HOSTS and not trusted:
        raise ValueError(
            f"{name}: other hosts reach {address}, and events ask for no token: use a loopback address, or "
            "set events.trusted_network = true"
        )
