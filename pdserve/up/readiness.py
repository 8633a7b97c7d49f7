"""Is a process ready? One attempt at a time, each bounded; a refusal of any kind is "not yet"."""

from __future__ import annotations

import asyncio
import json
import ssl
from typing import Any, Final
from urllib.parse import urlsplit

from pdserve.up.plan import ConnectReady, HttpReady

ATTEMPT_TIMEOUT_S: Final = 5.0
MAX_ANSWER_BYTES: Final = 1 << 20


async def is_ready(probe: HttpReady | ConnectReady) -> bool:
    """One attempt of at most `ATTEMPT_TIMEOUT_S`."""
    try:
        async with asyncio.timeout(ATTEMPT_TIMEOUT_S):
            if isinstance(probe, HttpReady):
                return (await http_get(probe.url))[0] == 200
            return await _accepts(probe.address)
    except (OSError, TimeoutError, ValueError):
        return False


async def served_model(router_url: str) -> str | None:
    """The name of the first model that the router lists, or None."""
    try:
        async with asyncio.timeout(ATTEMPT_TIMEOUT_S):
            status, body = await http_get(router_url + "/v1/models")
        listed: Any = json.loads(body)
        return str(listed["data"][0]["id"]) if status == 200 else None
    except (OSError, TimeoutError, ValueError, LookupError, TypeError):
        return None


async def http_get(url: str) -> tuple[int, bytes]:
    """Status and body of a GET. HTTP/1.0, so that the body ends with the connection.

    Raises OSError, or ValueError for what is not an HTTP answer.
    """
    parts = urlsplit(url)
    tls = None
    if parts.scheme == "https":  # our own process on this host: its certificate names another one
        tls = ssl.create_default_context()
        tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port, ssl=tls)
    try:
        writer.write(f"GET {parts.path or '/'} HTTP/1.0\r\nhost: {parts.netloc}\r\n\r\n".encode())
        answer = await reader.read(MAX_ANSWER_BYTES)
        while chunk := await reader.read(MAX_ANSWER_BYTES):
            answer += chunk
            if len(answer) > MAX_ANSWER_BYTES:
                raise ValueError(f"{url} answered more than {MAX_ANSWER_BYTES} bytes")
    finally:
        writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split(b" ", 2)[1]) if b" " in head else 0, body


async def _accepts(address: str) -> bool:
    scheme, _, rest = address.partition(":")
    if scheme == "unix":
        _, writer = await asyncio.open_unix_connection(rest)
    else:
        host, _, port = rest.rpartition(":")
        _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    writer.close()
    return True
