"""A throttle of failed logins by client address: API keys at a router. Pure; time is an input.

An unknown key is a failure of its address. After `BURST` failures, keys from this address are refused unseen,
right or wrong: otherwise the answer would tell an attacker hits from misses. `FORGIVEN_S` failures
are forgotten each second.

Clients that share an address with an attacker are not locked out: a token that was proved from that address
before is always checked. So only a client that is new at such an address waits until the attack ends. The
remaining gap: an attacker may try without a bound those tokens that clients at his own address use.

An address is an IP address (of IPv6 its first 64 bits, which one host has), or a user of this host.
"""

from __future__ import annotations

import ipaddress
from collections import OrderedDict
from collections.abc import Iterable
from functools import lru_cache
from typing import Final

BURST: Final = 64
"""A host with a wrong token in its configuration may have so many clients, and each tries it at its start."""
FORGIVEN_S: Final = 1.0
MAX_ADDRESSES: Final = 4096
MAX_PROVED: Final = 8192


class FailedLogins:
    """Counts failures by address, and remembers which tokens were proved from each."""

    def __init__(self, trusted: Iterable[str] = ()) -> None:
        """`trusted`: addresses without a bound, such as users who may read the process' memory anyhow."""
        self._trusted = frozenset(map(_plain, trusted))
        self._failures: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """Source → (failures that are not forgotten, when they were counted); the newest last."""
        self._proved: OrderedDict[tuple[str, bytes], None] = OrderedDict()

    def may_try(self, address: str, key_id: bytes, now_s: float) -> bool:
        """Whether to check a token with this key id."""
        source = _source(address)
        return (
            _plain(address) in self._trusted
            or (source, key_id) in self._proved
            or self._level(source, now_s) <= BURST - 1
        )

    def failed(self, address: str, now_s: float) -> None:
        """Count a failure: an unknown key."""
        source = _source(address)
        self._failures[source] = self._level(source, now_s) + 1, now_s
        self._failures.move_to_end(source)
        if len(self._failures) > MAX_ADDRESSES:
            self._failures.popitem(last=False)

    def proved(self, address: str, key_id: bytes) -> None:
        """A client has proved the token of this key id."""
        pair = _source(address), key_id
        self._proved[pair] = None
        self._proved.move_to_end(pair)
        if len(self._proved) > MAX_PROVED:
            self._proved.popitem(last=False)

    def wait_s(self, address: str, now_s: float) -> float:
        """Seconds until tokens from this address are checked again."""
        return max(0.0, self._level(_source(address), now_s) - (BURST - 1)) / FORGIVEN_S

    def _level(self, source: str, now_s: float) -> float:
        failures, at_s = self._failures.get(source, (0.0, now_s))
        return max(0.0, failures - (now_s - at_s) * FORGIVEN_S)


@lru_cache(MAX_ADDRESSES)  # a router asks for each request
def _plain(address: str) -> str:
    """One spelling of an address."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address  # a user of this host
    return str(getattr(parsed, "ipv4_mapped", None) or parsed)


@lru_cache(MAX_ADDRESSES)
def _source(address: str) -> str:
    """The unit that failures are counted by: an IPv4 address, a /64 network of IPv6, or a local user."""
    plain = _plain(address)
    if ":" not in plain:
        return plain
    try:
        return str(ipaddress.ip_network((int(ipaddress.IPv6Address(plain)) >> 64 << 64, 64)))
    except ValueError:
        return plain
