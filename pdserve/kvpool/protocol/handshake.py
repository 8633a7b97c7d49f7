"""How client and node prove to each other that both know a token, which neither of them sends. Pure.

A node keeps only the digest of a token T, D = SHA-256(T). The proofs follow SCRAM (RFC 5802), with D as its
stored key. Tokens are long and random (`tokens.MIN_CHARS`), so no slow hash is needed.

    client -> node    Hello       key id of T, client's nonce
    node -> client    Challenge   node's nonce, HMAC(D, "node" | transcript)
    client -> node    Proof       T, masked with SHAKE-256("client" | D | transcript)
    node              unmasks T, and accepts it if SHA-256(T) = D

The transcript holds both nonces, the key id, and what the client asked for. So a proof is good for one
connection. The client sends its proof only to a node that has proved to know D.

| who                                          | learns                                                    |
|----------------------------------------------|-----------------------------------------------------------|
| somebody who reads the wire                  | nothing but a hash to test guesses with                   |
| a false node without D                       | the same                                                  |
| somebody who knows D, from a configuration   | may pass for a node; the token, if he also reads the wire |

The proofs say who is there when the connection begins. Only TLS keeps somebody on the wire from taking an
open connection over, or from reading pages.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Final

import msgspec

from pdserve.errors import PoolRefused
from pdserve.kvpool.protocol.messages import Challenge, Hello, Proof
from pdserve.security.tokens import digest, same

NONCE_BYTES: Final = 32
KEY_ID_BYTES: Final = 16
PADDED_TO_BYTES: Final = 64  # the length of a masked token tells little of the token's


def key_id(token_digest: str) -> bytes:
    """The name of a token on the wire. `token_digest`: SHA-256 in hex."""
    return hashlib.sha256(b"pdserve key id" + bytes.fromhex(token_digest)).digest()[:KEY_ID_BYTES]


def without_token(hello: Hello, nonce: bytes) -> Hello:
    """The Hello to send: a token is only named. A Hello without a token stays as it is.

    `nonce`: NONCE_BYTES random bytes, as everywhere here.
    """
    if not hello.token:
        return hello
    return msgspec.structs.replace(hello, token="", key_id=key_id(digest(hello.token)), nonce=nonce)


class Challenged:
    """The node's side: a client that has named a token and is to prove it."""

    def __init__(self, hello: Hello, token_digest: str, node: str, nonce: bytes) -> None:
        """`token_digest`: of the token that the client has named, SHA-256 in hex."""
        self._hello = hello
        self._digest = token_digest
        unsigned = Challenge(node, nonce, b"")
        self.challenge = msgspec.structs.replace(unsigned, proof=_node_proof(token_digest, hello, unsigned))

    def accept(self, proof: Proof) -> Hello | None:
        """The client's Hello with the token in it; None if the proof is wrong."""
        text = _masked(proof.masked_token, self._digest, self._hello, self.challenge).rstrip(b"\0")
        try:
            token = text.decode()
        except UnicodeDecodeError:
            return None
        return (
            msgspec.structs.replace(self._hello, token=token) if same(digest(token), self._digest) else None
        )


def prove(hello: Hello, asked: Challenge, token: str) -> Proof:
    """The client's answer. `hello`: as it was sent. Raises PoolRefused: the node does not know the token."""
    token_digest = digest(token)
    if not hmac.compare_digest(_node_proof(token_digest, hello, asked), asked.proof):
        raise PoolRefused(f"pool node {asked.node} does not know the token that it was asked to prove")
    text = token.encode()
    padded = text.ljust(-(-len(text) // PADDED_TO_BYTES) * PADDED_TO_BYTES, b"\0")
    return Proof(_masked(padded, token_digest, hello, asked))


def _node_proof(token_digest: str, hello: Hello, asked: Challenge) -> bytes:
    transcript = _transcript(hello, asked)
    return hmac.digest(bytes.fromhex(token_digest), b"pdserve node" + transcript, "sha256")


def _masked(text: bytes, token_digest: str, hello: Hello, asked: Challenge) -> bytes:
    """`text` with the mask laid on, or taken off."""
    seed = b"pdserve client" + bytes.fromhex(token_digest) + _transcript(hello, asked)
    mask = hashlib.shake_256(seed).digest(len(text))
    return bytes(one ^ other for one, other in zip(text, mask, strict=True))


def _transcript(hello: Hello, asked: Challenge) -> bytes:
    told = [hello.version, hello.host_id, hello.data_path, hello.node, hello.key_id, hello.nonce]
    return msgspec.msgpack.encode([*told, asked.node, asked.nonce])
