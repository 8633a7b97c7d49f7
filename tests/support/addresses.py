"""Names that resolve to chosen addresses."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any


def names_of(*addresses: str) -> Callable[..., list[Any]]:
    """A `getaddrinfo` by which every name has these addresses, in this order."""

    def getaddrinfo(_host: str, port: int, *_: Any, **__: Any) -> list[Any]:
        return [
            (socket.AF_INET6, socket.SOCK_STREAM, 6, "", (address, port, 0, 0))
            if ":" in address
            else (socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))
            for address in addresses
        ]

    return getaddrinfo
