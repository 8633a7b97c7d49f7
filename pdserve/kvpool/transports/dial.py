"""Opening a node's socket within a deadline, including the look-up of its name.

The system's look-up has no time-out, so it runs in a thread, at most one per name. While the name service is
slow or absent, the last known addresses of the name are used.
"""

from __future__ import annotations

import ipaddress
import socket
import ssl
import struct
import threading
import time
from concurrent.futures import Future
from typing import Any, Final, TypeAlias

from pdserve.errors import PoolError, PoolRefused, PoolTimeout, PoolUnavailable
from pdserve.kvpool.protocol.address import TcpAddress, parse_address

Address: TypeAlias = tuple[int, Any]  # address family, and the argument of `socket.connect`
Name: TypeAlias = tuple[str, int]

PATIENCE_S: Final = 0.2  # wait for a new look-up of a name whose addresses are known


class Resolver:
    """Looks up names and keeps their addresses. A pool has few names. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[Name, list[Address]] = {}
        self._asking: dict[Name, Future[list[Address]]] = {}

    def find(self, host: str, port: int, deadline_s: float) -> list[Address]:
        """The name's addresses. Raises OSError if there are none, TimeoutError at the deadline."""
        name = (host, port)
        if _is_numeric(host):
            return _look_up(name)
        known = self._known.get(name)
        until = deadline_s if known is None else min(deadline_s, time.monotonic() + PATIENCE_S)
        try:
            return self._ask(name).result(max(0.0, until - time.monotonic()))
        except OSError:
            if known is None:
                raise
            return known

    def _ask(self, name: Name) -> Future[list[Address]]:
        with self._lock:
            answer = self._asking.get(name)
            if answer is None:
                answer = Future()
                thread = threading.Thread(
                    target=self._run, args=(name, answer), name="pdserve-resolve", daemon=True
                )
                try:
                    thread.start()
                except RuntimeError as error:
                    raise OSError(f"its name cannot be resolved: {error}") from error
                self._asking[name] = answer
            return answer

    def _run(self, name: Name, answer: Future[list[Address]]) -> None:
        try:
            found = _look_up(name)
        except OSError as error:
            with self._lock:
                del self._asking[name]
            answer.set_exception(error)
            return
        with self._lock:
            self._known[name] = found
            del self._asking[name]
        answer.set_result(found)


def _is_numeric(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _look_up(name: Name) -> list[Address]:
    try:
        found = socket.getaddrinfo(*name, type=socket.SOCK_STREAM)
    except UnicodeError as error:
        raise OSError(f"{name[0]!r} is no host name") from error
    return [(family, address) for family, _, _, _, address in found]


RETRY_CONNECT_S: Final = 0.002


_resolver: Final = Resolver()


def open_socket(
    address: str, deadline_s: float, tls: ssl.SSLContext | None = None, server_name: str = ""
) -> socket.socket:
    """A connected socket. `tls`: over TCP the node must show a certificate that this context accepts, for
    `server_name` (empty: the host in `address`). A Unix socket goes without TLS.

    Raises PoolUnavailable, PoolTimeout, PoolRefused (a certificate that is not accepted), ConfigError.
    """
    parsed = parse_address(address)
    timeout_s = deadline_s - time.monotonic()
    if timeout_s <= 0:
        raise PoolTimeout(f"no time left to connect to pool node {address}")
    try:
        if isinstance(parsed, TcpAddress):
            plain = _connect_tcp(parsed, deadline_s)
            if tls is None:
                return plain
            return _secured(plain, tls, server_name or parsed.host, address, deadline_s)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(timeout_s)
            connect_unix(sock, parsed.path, deadline_s)
        except OSError:
            sock.close()
            raise
        return sock
    except TimeoutError as error:
        raise PoolTimeout(f"pool node {address} does not accept connections") from error
    except OSError as error:
        raise PoolUnavailable(f"pool node {address} cannot be reached: {error.strerror or error}") from error


def _connect_tcp(where: TcpAddress, deadline_s: float) -> socket.socket:
    """Try each address of the name, each for a share of the time. Raises OSError, TimeoutError."""
    addresses = _resolver.find(where.host, where.port, deadline_s)
    for tried, (family, address) in enumerate(addresses, 1):
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            left_s = (deadline_s - time.monotonic()) / (len(addresses) - tried + 1)
            if left_s <= 0:
                raise TimeoutError
            sock.settimeout(left_s)
            sock.connect(address)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return sock
        except OSError:
            sock.close()
            if tried == len(addresses):
                raise
    raise OSError("it has no address")


def _secured(
    plain: socket.socket, tls: ssl.SSLContext, server_name: str, address: str, deadline_s: float
) -> ssl.SSLSocket:
    """The socket after its TLS handshake. Raises TimeoutError, PoolUnavailable, PoolRefused."""
    try:
        sock = tls.wrap_socket(plain, server_hostname=server_name, do_handshake_on_connect=False)
    except (OSError, ValueError) as error:
        plain.close()
        raise PoolUnavailable(f"pool node {address}: no TLS: {error}") from error
    try:
        sock.settimeout(max(0.001, deadline_s - time.monotonic()))
        sock.do_handshake()
    except TimeoutError:
        sock.close()
        raise
    except OSError as error:
        sock.close()
        raise tls_error(address, error) from error
    return sock


def tls_error(address: str, error: OSError) -> PoolError:
    """What became of a handshake."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return PoolRefused(
            f"pool node {address} shows a certificate that tls.ca does not vouch for: {error.verify_message}"
        )
    reason = getattr(error, "reason", None) or error.strerror or error
    return PoolUnavailable(
        f"pool node {address} does not speak TLS as we do, or asks for a certificate: {reason}"
    )


def connect_unix(sock: socket.socket, path: str, deadline_s: float) -> None:
    """Connect, and retry while the listener's backlog is full: a Unix socket does not wait by itself.

    Raises OSError, or TimeoutError at the deadline.
    """
    while True:
        try:
            sock.connect(path)
            return
        except BlockingIOError:
            if time.monotonic() >= deadline_s:
                raise TimeoutError from None
            time.sleep(RETRY_CONNECT_S)


def peer_uid(sock: socket.socket) -> int:
    """The user at the other end of a Unix socket, as the kernel knows it. Raises OSError."""
    _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(uid)
