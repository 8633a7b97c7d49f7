"""Host names to addresses, within a deadline: the system's look-up takes as long as it likes.

It runs in a thread, one for a name at a time. While the name service is slow or away, the addresses that a
name had last are used.
"""

from __future__ import annotations

import ipaddress
import socket
import threading
import time
from concurrent.futures import Future
from typing import Any, Final, TypeAlias

Address: TypeAlias = tuple[int, Any]  # family and what `socket.connect` takes
Name: TypeAlias = tuple[str, int]

PATIENCE_S: Final = 0.2  # for a look-up of a name whose addresses are known


class Resolver:
    """Remembers the addresses of every name it was asked for: a pool's nodes, few. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[Name, list[Address]] = {}
        self._asking: dict[Name, Future[list[Address]]] = {}

    def find(self, host: str, port: int, deadline: float) -> list[Address]:
        """Raises OSError: there is none; TimeoutError: it is not known in time."""
        name = (host, port)
        if _is_numeric(host):
            return _look_up(name)
        known = self._known.get(name)
        until = deadline if known is None else min(deadline, time.monotonic() + PATIENCE_S)
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
