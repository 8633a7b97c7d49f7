"""Encryption of stored pages: AES-256-GCM, with a key for each namespace.

    stored bytes = key id (8) | random (24) | ciphertext | tag (16)

    namespace key = HKDF-SHA256(secret, the namespace's name)
    page key      = HMAC-SHA256(namespace key, the first 12 random bytes)
    nonce         = the last 12 random bytes

A nonce must never be used twice with a key. 24 random bytes for each page need no counter, so nothing has to
survive a restart, and copies of a disk or a machine draw other bytes. (AES-GCM's own 12 bytes are too few for
random ones: after 2^32 pages of one key they may repeat. XAES-256-GCM of C2SP derives keys in this way.)

The tag covers what names the page: space, key, length, the writer's checksum and the compression. So a stored
page cannot be given out under another name, not even one of the same namespace. The namespace is in the key.

A secret encrypts the namespaces that match its patterns; of several the first in the file. All are tried for
reading, by key id, so a new secret is put before the old one. A namespace that matches none is stored plain.
A page that is stored plain is no page of a namespace that matches: whoever writes to the disk could put it
there.
"""

from __future__ import annotations

import hmac
import os
import stat
import struct
from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from pdserve.errors import ConfigError
from pdserve.extras import needed_by
from pdserve.kvpool.tiers.base import TierPage

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

AES_GCM: Final = 1  # number of the cipher in a record
SECRET_BYTES: Final = 32
MAX_FILE_BYTES: Final = 1 << 20
MAX_SECRETS: Final = 64
KEY_ID_BYTES: Final = 8
RANDOM_BYTES: Final = 24
TAG_BYTES: Final = 16
OVERHEAD_BYTES: Final = KEY_ID_BYTES + RANDOM_BYTES + TAG_BYTES
_LABEL: Final = b"pdserve stored page 1\0"
_NAMED = struct.Struct("<Q32sQQQ")  # space, key, length, checksum, compression


class SecretEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`secret`: 64 hexadecimal digits. `namespaces`: patterns, in which `*` is any text."""

    secret: str
    namespaces: tuple[str, ...] = ("*",)


class KeyFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file with the keys of a tier."""

    keys: list[SecretEntry]


class PageCipher:
    """Encrypts the pages of all namespaces. Thread-safe."""

    def __init__(self, entries: Sequence[SecretEntry]) -> None:
        """Raises ValueError; ConfigError: the package `cryptography` is missing."""
        with needed_by("encryption of pages in a tier", "encryption"):
            from cryptography.exceptions import InvalidTag
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        if not 0 < len(entries) <= MAX_SECRETS:
            raise ValueError(f"the file must have 1 to {MAX_SECRETS} keys")
        self._entries = [(_secret(entry.secret), entry.namespaces) for entry in entries]
        self._ids = [
            hmac.digest(secret, _LABEL + b"id", "sha256")[:KEY_ID_BYTES] for secret, _ in self._entries
        ]
        self._cipher, self._wrong_tag = AESGCM, InvalidTag
        self._namespace_key = lru_cache(4096)(self._derive)

    def covers(self, namespace: str) -> bool:
        """Whether pages of the namespace are encrypted."""
        return self._number(namespace) >= 0

    def seal(self, namespace: str, page: TierPage, compression: int, data: memoryview | bytes) -> bytes:
        """The stored bytes of a page of a namespace that is covered."""
        number = self._number(namespace)
        random = os.urandom(RANDOM_BYTES)
        sealed = self._aead(number, namespace, random).encrypt(random[12:], data, _named(page, compression))
        return self._ids[number] + random + sealed

    def open(self, namespace: str, page: TierPage, compression: int, stored: memoryview) -> bytes | None:
        """What was sealed under this name; None: it was not, or its key is not in the file."""
        key_id = bytes(stored[:KEY_ID_BYTES])
        random = bytes(stored[KEY_ID_BYTES : KEY_ID_BYTES + RANDOM_BYTES])
        if len(stored) < OVERHEAD_BYTES or key_id not in self._ids:
            return None
        number = self._ids.index(key_id)
        sealed = stored[KEY_ID_BYTES + RANDOM_BYTES :]
        try:
            return self._aead(number, namespace, random).decrypt(
                random[12:], sealed, _named(page, compression)
            )
        except self._wrong_tag:
            return None

    def _number(self, namespace: str) -> int:
        for number, (_, patterns) in enumerate(self._entries):
            if any(fnmatchcase(namespace, pattern) for pattern in patterns):
                return number
        return -1

    def _aead(self, number: int, namespace: str, random: bytes) -> AESGCM:
        key = hmac.digest(self._namespace_key(number, namespace), random[:12], "sha256")
        return self._cipher(key)

    def _derive(self, number: int, namespace: str) -> bytes:
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        secret = self._entries[number][0]
        return HKDF(SHA256(), SECRET_BYTES, salt=None, info=_LABEL + namespace.encode()).derive(secret)


def read_keys(path: Path) -> PageCipher:
    """The keys of a file that only its owner may read. Raises ConfigError."""
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            if found.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise ConfigError(f"{path} can be read by other users: chmod 600 {path}")
            text = file.read(MAX_FILE_BYTES)
        return PageCipher(msgspec.toml.decode(text, type=KeyFile).keys)
    except OSError as error:
        raise ConfigError(f"cannot read the keys in {path}: {error.strerror}") from None
    except (msgspec.MsgspecError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from None


def _secret(text: str) -> bytes:
    try:
        secret = bytes.fromhex(text)
    except ValueError:
        secret = b""
    if len(secret) != SECRET_BYTES:  # the text itself is not to be shown
        raise ValueError("each secret must be 64 hexadecimal digits: `openssl rand -hex 32` makes one")
    return secret


def _named(page: TierPage, compression: int) -> bytes:
    named = _NAMED.pack(page.space, page.key, page.length_bytes, page.checksum, compression)
    return _LABEL + named
