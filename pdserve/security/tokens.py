"""Secrets that prove who somebody is: API keys, the cluster's token, tokens of namespaces.

What is kept is their SHA-256 digest; they are long and random, so that no slow hash is needed.

An option that is a secret has the type `Secret`. It has no flag, because every user of a host sees the
command lines of all. Its value comes from the configuration file, from the file that `NAME_file` names there
(`settings.config_file` makes it a `SecretFile`), or from an environment variable.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pdserve.errors import ConfigError

MIN_CHARS = 16
"""A shorter secret could be guessed; `pdserve key` makes one of 43 characters."""
_DIGEST = re.compile(r"[0-9a-f]{64}")
_PRINTABLE = re.compile(r"[\x21-\x7e]+")
HIDDEN = "***"


class Secret(str):
    """Text that is not shown: not by `repr`, `str`, `print`, `%s`, f-strings or a log, in whatever struct it
    stands. msgspec encodes none. `reveal` gives the text, where it is sent or compared.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return repr(HIDDEN if self else "")

    def __str__(self) -> str:
        return HIDDEN if self else ""

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)


class SecretFile(Secret):
    """A secret whose text is in a file; this is the file's path. `given_secret` reads it, when a process that
    needs it starts: the host that checks a configuration may not have the file.
    """

    __slots__ = ()


def reveal(secret: str) -> str:
    """The text of a secret. Raises TypeError for one that is still in its file."""
    if isinstance(secret, SecretFile):
        raise TypeError("a secret is in a file that nobody has read")
    return str.__str__(secret)


def decode_secret(type_: type[Any], value: Any) -> Any:
    """msgspec's `dec_hook`, for structs with secrets and paths."""
    if isinstance(value, type_):
        return value
    if type_ in (Secret, Path) and isinstance(value, str):
        return type_(value)
    raise ValueError(f"Expected `str`, got `{type(value).__name__}`")


def reveal_secret(value: Any) -> str:
    """msgspec's `enc_hook`, for structs that go to a process of ours, where no other user can read them."""
    if isinstance(value, Secret):
        return reveal(value)
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(f"{type(value).__name__} cannot be encoded")


def withhold_secret(value: Any) -> str:
    """msgspec's `enc_hook`, for structs that are shown: a secret is left out, a path is its text."""
    if isinstance(value, Secret):
        return ""
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(f"{type(value).__name__} cannot be encoded")


def digest(token: str) -> str:
    """Of a token as a client presents it, SHA-256 in hex. Empty for none."""
    return hashlib.sha256(token.encode()).hexdigest() if token else ""


def digest_of_setting(text: str) -> str:
    """Of a token as a configuration has it, where `sha256:...` is a digest already. Never for what a client
    presents: whoever saw a digest would have the token.
    """
    if text.startswith("sha256:"):
        return text.removeprefix("sha256:").lower()
    return digest(text)


def is_digest(text: str) -> bool:
    """Whether `text` is a SHA-256 in lower-case hex."""
    return _DIGEST.fullmatch(text) is not None


def same(one: str, other: str) -> bool:
    """Whether two digests are equal, in a time that does not tell where they differ. Empty ones never are."""
    return bool(one) and hmac.compare_digest(one.encode(), other.encode())


def bearer(authorization: bytes | None) -> str:
    """The token of an `Authorization: Bearer` header; empty for another scheme or none."""
    if authorization is None or authorization[:7].lower() != b"bearer ":
        return ""
    return authorization[7:].strip().decode("latin-1")


def read_token(file: Path) -> str:
    """The token in a file, without the line's end. Raises ConfigError."""
    try:
        token = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the token file {file} cannot be read: {error}") from None
    if not token:
        raise ConfigError(f"the token file {file} is empty")
    return token


def given_secret(secret: str, variable: str, environ: Mapping[str, str]) -> str:
    """The text of a secret, read from its file if it is in one; where none is given, that of the environment
    variable; empty for none. Raises ConfigError.
    """
    if isinstance(secret, SecretFile):
        return read_token(Path(str.__str__(secret)))
    return reveal(secret) or environ.get(variable, "").strip()


def secret_of(name: str, given: str, variable: str, environ: Mapping[str, str]) -> str:
    """As `given_secret`. Raises ConfigError also for one that is short, or that no header can carry."""
    secret = given_secret(given, variable, environ)
    if secret and (len(secret) < MIN_CHARS or not _PRINTABLE.fullmatch(secret)):
        raise ConfigError(f"{name} must be {MIN_CHARS} characters or more, printable ASCII without spaces")
    return secret
