"""Which clients a node lets in, and how they move pages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from pdserve.kvpool.node.admission import Admission, Places, rules_of
from pdserve.kvpool.node.config import ClusterConfig, PoolNodeConfig, TcpConfig, UcxConfig
from pdserve.kvpool.protocol import messages as m
from pdserve.kvpool.protocol.cluster_messages import View
from pdserve.kvpool.protocol.handshake import NONCE_BYTES, key_id, without_token
from pdserve.kvpool.transports.session import make_hello
from pdserve.security.tls import TlsConfig
from pdserve.security.tokens import digest

TOKEN = "the-token-of-the-operator"
TLS = TlsConfig(certificate=Path("/c"), key=Path("/k"), ca=Path("/a"))
HERE, LOOPBACK, MAPPED, FAR = "uid 0", "127.0.0.1", "::ffff:127.0.0.1", "192.0.2.9"
TRUSTED, OFF, GUARDED = {"trusted_network": True}, {"enabled": False}, {"admin": TOKEN}


class Door:
    """Who comes to a node. `options`: of its configuration."""

    def __init__(self, *, admin: str = "", **options: Any) -> None:
        config = PoolNodeConfig(name="n", admin_token=admin, **options)
        known = {key_id(digest(admin)): digest(admin)} if admin else {}
        self.admission = Admission(
            config,
            rules_of(config),
            1,
            Places(8, tokens_in_use=bool(admin)),
            lambda: View(0, 0, []),
            lambda named: known.get(named, ""),
        )

    def names(self, token: str, node: str = "") -> str:
        """The code of the refusal; empty where the node goes on."""
        asked = make_hello("w", "elsewhere", "none", token)
        named = without_token(msgspec.structs.replace(asked, node=node), bytes(NONCE_BYTES))
        answer = self.admission.challenge(named)
        return answer.code if isinstance(answer, m.Fault) else ""

    def path(self, address: str, wanted: m.DataPathChoice, token: str = "") -> m.DataPathName | m.Fault:
        """Of a client that has proved its token, where it has one."""
        hello = make_hello("w", "elsewhere", wanted, token)
        proved = msgspec.structs.replace(hello, key_id=key_id(digest(token))) if token else hello
        return self.admission.choose_path(address, proved)

    def sends(self, token: str) -> str:
        """In clear, which no client of ours does; the code of the refusal."""
        answer = self.admission.choose_path(FAR, make_hello("w", "elsewhere", "none", token))
        return answer.code if isinstance(answer, m.Fault) else ""


@pytest.mark.parametrize(
    ("address", "wanted", "ucx", "node", "found"),
    [
        (HERE, "ucx", {}, {}, "ucx"),
        (LOOPBACK, "ucx", {}, {}, "ucx"),
        (MAPPED, "ucx", {}, {}, "ucx"),
        (HERE, "ucx", OFF, {}, "!has UCX off"),
        (HERE, "shm", {}, {}, "!another host"),
        # ucxx listens on IPv4 alone
        ("::1", "auto", TRUSTED, {}, "tcp"),
        ("2001:db8::1", "auto", TRUSTED, {}, "tcp"),
        ("::1", "ucx", TRUSTED, {}, "!over IPv6"),
        ("2001:db8::1", "ucx", TRUSTED, {}, "!data_path = 'tcp'"),
        # UCX asks for no token: other hosts have to be trusted
        (FAR, "ucx", {}, {}, "!ucx.trusted_network = true"),
        ("::ffff:192.0.2.9", "ucx", {}, {}, "!ucx.trusted_network = true"),
        ("unknown", "ucx", {}, {}, "!ucx.trusted_network = true"),
        (FAR, "ucx", TRUSTED, {}, "ucx"),
        ("::ffff:192.0.2.9", "ucx", TRUSTED, {}, "ucx"),
        (FAR, "auto", {}, {}, "tcp"),
        (FAR, "auto", TRUSTED, {}, "ucx"),
        (FAR, "auto", TRUSTED | OFF, {}, "tcp"),
        (FAR, "tcp", TRUSTED, {}, "tcp"),
        # where tokens are in use it is for those with one
        (HERE, "ucx", TRUSTED, GUARDED, "!token"),
        (FAR, "ucx", TRUSTED, {**GUARDED, "shows": "a guess"}, "!token"),
        (HERE, "ucx", TRUSTED, {**GUARDED, "shows": TOKEN}, "ucx"),
        (FAR, "ucx", TRUSTED, {**GUARDED, "shows": TOKEN}, "ucx"),
        # pages of clients that come by TLS go by TLS unless they ask for UCX
        (FAR, "auto", TRUSTED, {"tls": TLS}, "tcp"),
        (FAR, "ucx", TRUSTED, {"tls": TLS}, "ucx"),
        (FAR, "auto", TRUSTED, {"tls": TLS, "tcp": TcpConfig(enabled=False)}, "ucx"),
        (HERE, "auto", TRUSTED, {"tls": TLS}, "ucx"),  # its ports are on loopback
    ],
)
def test_how_a_clients_pages_go(
    address: str, wanted: m.DataPathChoice, ucx: dict[str, Any], node: dict[str, Any], found: str
) -> None:
    options = dict(node)
    token = options.pop("shows", "")
    path = Door(ucx=UcxConfig(**ucx), **options).path(address, wanted, token)
    if found.startswith("!"):
        assert isinstance(path, m.Fault)
        assert found[1:] in path.message
    else:
        assert path == found


def test_a_node_without_ucx_gives_tcp_and_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdserve.kvpool.node.admission.is_installed", lambda extra: False)
    door = Door(ucx=UcxConfig(trusted_network=True))
    assert door.path(FAR, "auto") == "tcp"
    refused = door.path(FAR, "ucx")
    assert isinstance(refused, m.Fault)
    assert "pip install 'pdserve[ucx]'" in refused.message


def test_a_token_that_is_none_of_the_pools_is_refused_however_it_comes() -> None:
    door = Door(admin=TOKEN, cluster=ClusterConfig(token="the-nodes-token"))
    assert door.names("a guess") == door.names("a guess", node="b") == door.sends(TOKEN) == "bad_token"
    assert door.names(TOKEN) == door.names("the-nodes-token", node="b") == ""
