"""Which clients a node lets in, and how they move pages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from pdserve.kvpool.node.admission import Admission, rules_of
from pdserve.kvpool.node.config.cluster import ClusterConfig
from pdserve.kvpool.node.config.node import PoolNodeConfig, TcpConfig, UcxConfig
from pdserve.kvpool.node.serving.places import Places
from pdserve.kvpool.protocol import messages as m
from pdserve.kvpool.protocol.cluster_messages import View
from pdserve.kvpool.protocol.handshake import NONCE_BYTES, key_id, without_token
from pdserve.kvpool.transports.session import make_hello
from pdserve.security.failed_logins import BURST
from pdserve.security.tls import TlsConfig
from pdserve.security.tokens import digest

TOKEN = "the-token-of-the-operator"
TLS = TlsConfig(certificate=Path("/c"), key=Path("/k"), ca=Path("/a"))
HERE, LOOPBACK, MAPPED, FAR = "uid 0", "127.0.0.1", "::ffff:127.0.0.1", "192.0.2.9"
TRUSTED, OFF, GUARDED = {"trusted_network": True}, {"enabled": False}, {"admin": TOKEN}


class Door:
    """Who comes to a node, at a time of the test's. `options`: of its configuration."""

    def __init__(self, *, admin: str = "", **options: Any) -> None:
        self.now_s = 0.0
        config = PoolNodeConfig(name="n", admin_token=admin, **options)
        known = {key_id(digest(admin)): digest(admin)} if admin else {}
        self.admission = Admission(
            config,
            rules_of(config),
            1,
            Places(8),
            lambda: View(0, 0, []),
            lambda named: known.get(named, ""),
            lambda: self.now_s,
        )

    def names(self, token: str, address: str = FAR, node: str = "") -> str:
        """The code of the refusal; empty where the node goes on."""
        asked = make_hello("w", "elsewhere", "none", token)
        named = without_token(msgspec.structs.replace(asked, node=node), bytes(NONCE_BYTES))
        answer = self.admission.challenge(address, named)
        return answer.code if isinstance(answer, m.Fault) else ""

    def path(self, address: str, wanted: m.DataPathChoice, token: str = "") -> m.DataPathName | m.Fault:
        """Of a client that has proved its token, where it has one."""
        hello = make_hello("w", "elsewhere", wanted, token)
        proved = msgspec.structs.replace(hello, key_id=key_id(digest(token))) if token else hello
        return self.admission.choose_path(1, address, proved)

    def sends(self, token: str) -> str:
        """In clear, which no client of ours does; the code of the refusal."""
        answer = self.admission.choose_path(1, FAR, make_hello("w", "elsewhere", "none", token))
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


@pytest.mark.parametrize("how", ["names", "sends", "names the nodes'", "proves wrongly"])
def test_who_tries_tokens_is_told_nothing_more_after_some(how: str) -> None:
    door = Door(admin=TOKEN, cluster=ClusterConfig(token="the-nodes-token"))
    for number in range(BURST):
        match how:
            case "names":
                assert door.names(f"guess {number}") == "bad_token"
            case "sends":
                assert door.sends(f"guess {number}") == "bad_token"
            case "names the nodes'":
                assert door.names(f"guess {number}", node="b") == "bad_token"
            case _:
                door.admission.wrong_proof(FAR)
    for token in ("one more", TOKEN):
        assert door.names(token) == "too_many_guesses"
    assert door.names("the-nodes-token", node="b") == "too_many_guesses"
    assert door.names(TOKEN, address="192.0.2.10") == ""
    door.now_s += 1.0
    assert door.names(TOKEN) == ""


def test_a_client_that_proved_its_token_comes_again_from_an_address_that_guesses() -> None:
    door = Door(admin=TOKEN)
    shown = make_hello("w", "elsewhere", "none", TOKEN)
    door.admission.connected(1, FAR, msgspec.structs.replace(shown, token=TOKEN), "none")
    for number in range(10 * BURST):
        door.names(f"guess {number}")
    assert door.names(TOKEN) == ""
    assert door.sends(TOKEN) == "bad_token"
