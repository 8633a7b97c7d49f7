"""Base URLs of workers in the configuration."""

from __future__ import annotations

import ipaddress
import re
from typing import Final
from urllib.parse import urlsplit


def parse_base_url(url: str) -> tuple[str, int]:
    """(host, port) of a worker's base URL. Raises ValueError that says what is wrong with it."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
        _check_host(host or "")
    except ValueError as error:
        raise ValueError(f"worker URL {url!r}: {error}") from None
    bare = parts.path in ("", "/") and not parts.query and not parts.username
    if parts.scheme not in ("http", "https") or not host or not bare or not url.isprintable():
        raise ValueError(f"worker URL {url!r} is not of the form http://HOST:PORT or https://HOST:PORT")
    if port == 0:
        raise ValueError(f"worker URL {url!r}: port 0 is no port; name the port that the worker listens on")
    return host, port or (443 if parts.scheme == "https" else 80)


_DIGITS: Final = re.compile(r"[0-9.]+")
_NAME: Final = re.compile(rb"[A-Za-z0-9_.-]*")


def _check_host(host: str) -> None:
    if ":" in host or _DIGITS.fullmatch(host):
        ipaddress.ip_address(host)  # 10.0.0.256 is no address
    elif not _NAME.fullmatch(host.encode("idna")):  # a..b is no name
        raise ValueError(f"{host!r} is no name of a host")


def is_https(url: str) -> bool:
    """Whether a worker with this base URL speaks TLS."""
    return urlsplit(url).scheme == "https"
