"""Discovery by DNS: one name with the addresses of many processes, as a headless service has in Kubernetes,
Compose or Nomad. All addresses of a name are looked up again every `LOOKUP_S` seconds.

DNS names processes and says nothing of their health; who uses the addresses probes them. Three rules keep a
poor resolver from emptying a fleet:

- A lookup that fails, or does not end in time, changes nothing.
- An answer without an address that was known counts once. The address goes with the second such answer in a
  row, because resolvers may answer with a part of the addresses, or with none for a moment.
- A name has at most one lookup in progress. So a resolver that hangs costs one thread a name.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple
from urllib.parse import urlsplit

logger = logging.getLogger(__name__)

PREFIX: Final = "dns+"
LOOKUP_S: Final = 5.0
TIMEOUT_S: Final = 5.0
"""Longest wait for one answer. An answer that comes later is taken by the next lookup."""
ABSENT_ANSWERS: Final = 2
NO_ADDRESS: Final = (socket.EAI_NONAME, socket.EAI_NODATA)
"""Answers, in contrast to failures: the name has no address now."""

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""(name, port) to its IP addresses. Raises OSError (socket.gaierror) and UnicodeError."""


class DnsName(NamedTuple):
    """`dns+SCHEME://HOST:PORT`, or `dns+tcp:HOST:PORT` of a pool node."""

    scheme: str
    host: str
    port: int


def is_dns_name(address: str) -> bool:
    """Whether an address of a list is a name to look up, and not the address of one process."""
    return address.startswith(PREFIX)


def parse_dns_name(address: str, scheme: str) -> DnsName:
    """Raises ValueError for what is not a DNS name of this scheme."""
    separator = ":" if scheme == "tcp" else "://"
    rest = address.removeprefix(f"{PREFIX}{scheme}{separator}")
    try:
        parts = urlsplit(f"//{rest}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if rest == address or not host or not port or rest.rstrip("/") != parts.netloc or "@" in rest:
        raise ValueError(f"{address!r} is not of the form {PREFIX}{scheme}{separator}HOST:PORT")
    return DnsName(scheme, host, port)


def host_port(address: str, port: int) -> str:
    """`ADDRESS:PORT`, with brackets around an IPv6 address."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


async def resolve_by_system(host: str, port: int) -> Sequence[str]:
    """All addresses of a name, by the system's resolver in a thread of the loop's executor."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


class DnsWatch:
    """The addresses of some names, kept current in the loop that calls `look` and `run`."""

    def __init__(
        self,
        names: Iterable[DnsName],
        changed: Callable[[Mapping[DnsName, Sequence[str]]], None],
        resolve: Resolve = resolve_by_system,
    ) -> None:
        """`changed` gets the sorted addresses of all names, after the first lookup and after each change."""
        self._changed = changed
        self._resolve = resolve
        self._absences: dict[DnsName, dict[str, int]] = {name: {} for name in names}
        """Known addresses, each with the number of answers in a row that lacked it."""
        self._asking: dict[DnsName, asyncio.Future[Sequence[str]]] = {}
        self._told: dict[DnsName, list[str]] | None = None
        self._problems: dict[DnsName, str] = {}

    async def look(self) -> None:
        """Look all names up once; takes at most `TIMEOUT_S`, whatever the resolver does."""
        await asyncio.gather(*map(self._look_up, self._absences))
        found = {name: sorted(known) for name, known in self._absences.items()}
        if found != self._told:
            self._told = found
            self._changed(found)

    async def run(self) -> None:
        """Look the names up again and again, until cancelled; at once if `look` has not ended before."""
        while True:
            if self._told is not None:
                await asyncio.sleep(LOOKUP_S)
            await self.look()

    def close(self) -> None:
        """Leave the lookups in progress; after `run` was cancelled."""
        for asking in self._asking.values():
            asking.cancel()

    async def _look_up(self, name: DnsName) -> None:
        if name not in self._asking:
            self._asking[name] = asyncio.ensure_future(self._resolve(name.host, name.port))
        asking = self._asking[name]
        done, _ = await asyncio.wait([asking], timeout=TIMEOUT_S)
        if not done:
            self._warn(name, f"no answer within {TIMEOUT_S:g} s")
            return
        del self._asking[name]
        answer: Sequence[str] = ()
        try:
            answer = asking.result()
        except (OSError, UnicodeError) as error:
            if not (isinstance(error, socket.gaierror) and error.errno in NO_ADDRESS):
                self._warn(name, str(error))
                return
        self._warn(name, "" if answer else "it has no address")
        known = self._absences[name]
        known |= dict.fromkeys(answer, 0)
        for address in known.keys() - set(answer):
            known[address] += 1
            if known[address] >= ABSENT_ANSWERS:
                del known[address]

    def _warn(self, name: DnsName, problem: str) -> None:
        """Log a problem once, until another one or none takes its place."""
        if problem and problem != self._problems.get(name):
            logger.warning("DNS name %s: %s", name.host, problem)
        self._problems[name] = problem
