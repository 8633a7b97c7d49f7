"""Is a process ready? One attempt at a time, each bounded. A refusal of any kind means "not yet"."""

from __future__ import annotations

import asyncio
import ssl
from typing import Any, Final

import httpx

from pdserve.up.spec import ConnectReady, HttpReady

ATTEMPT_TIMEOUT_S: Final = 5.0


async def is_ready(probe: HttpReady | ConnectReady) -> bool:
    """One attempt of at most `ATTEMPT_TIMEOUT_S`."""
    try:
        async with asyncio.timeout(ATTEMPT_TIMEOUT_S):
            if isinstance(probe, HttpReady):
                return (await _get(probe.url, probe.certificate)).status_code == httpx.codes.OK
            return await _accepts(probe.address)
    except (OSError, TimeoutError, ValueError, httpx.HTTPError):
        return False


async def served_model(router_url: str) -> str | None:
    """The name of the first model that the router lists, or None."""
    try:
        async with asyncio.timeout(ATTEMPT_TIMEOUT_S):
            answer = await _get(f"{router_url}/v1/models")
        listed: Any = answer.json()
        return str(listed["data"][0]["id"]) if answer.status_code == httpx.codes.OK else None
    except (OSError, TimeoutError, ValueError, LookupError, TypeError, httpx.HTTPError):
        return None


async def _get(url: str, certificate: tuple[str, str] | None = None) -> httpx.Response:
    """A GET to a process of our own on this host, whose certificate names another one."""
    verify: ssl.SSLContext | bool = False
    if certificate is not None:
        verify = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        verify.check_hostname, verify.verify_mode = False, ssl.CERT_NONE
        verify.load_cert_chain(*certificate)
    async with httpx.AsyncClient(verify=verify, trust_env=False, timeout=ATTEMPT_TIMEOUT_S) as client:
        return await client.get(url)


async def _accepts(address: str) -> bool:
    scheme, _, rest = address.partition(":")
    if scheme == "unix":
        _, writer = await asyncio.open_unix_connection(rest)
    else:
        host, _, port = rest.rpartition(":")
        _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    writer.close()
    return True
