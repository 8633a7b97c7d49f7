"""Secrets of a router (API keys, admin key, cluster token) from files and the environment, and `pdserve key`,
which makes an API key. API keys are stored as SHA-256 digests only.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from pdserve.errors import ConfigError
from pdserve.kvpool.protocol.address import is_loopback
from pdserve.router.config.router import RouterConfig
from pdserve.router.config.tenants import NAME_PATTERN, SHARED, Access, Admin
from pdserve.security.tokens import MIN_CHARS, digest, digest_of_setting, is_digest, secret_of

KEYS_VARIABLE = "PDSERVE_API_KEYS"
CLUSTER_VARIABLE = "PDSERVE_CLUSTER_TOKEN"
ADMIN_VARIABLE = "PDSERVE_ADMIN_KEY"
_NAME = re.compile(NAME_PATTERN)


def load_keys(access: Access, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Digest of each API key → its tenant. Raises ConfigError, whose text shows no key."""
    keys: dict[str, str] = {}
    if access.keys_file is not None:
        for number, line in enumerate(_lines(access.keys_file), 1):
            words = line.partition("#")[0].split()
            if words:
                where = f"{access.keys_file}, line {number}"
                if len(words) != 2 or not words[1].startswith("sha256:"):
                    raise ConfigError(f"{where}: a line is `TENANT sha256:DIGEST`; `pdserve key` makes one")
                _add(keys, where, words[0], words[1])
        if not keys:
            raise ConfigError(f"{access.keys_file} has no keys: `pdserve key TENANT --file FILE` adds one")
    for i, entry in enumerate(filter(None, map(str.strip, environ.get(KEYS_VARIABLE, "").split(","))), 1):
        where = f"{KEYS_VARIABLE}, entry {i}"
        tenant, equals, key = entry.partition("=")
        if not equals:
            raise ConfigError(f"{where}: an entry is TENANT=KEY")
        _add(keys, where, tenant.strip(), key.strip())
    return keys


def check_open(config: RouterConfig, keys: Mapping[str, str]) -> bool:
    """Whether everyone on the network may use the models, which `insecure` allows. Raises ConfigError where
    it does not.
    """
    is_open = not keys and not is_loopback(config.host)
    if is_open and not config.insecure:
        raise ConfigError(
            f"host {config.host} serves other hosts, and there are no API keys: set access.keys_file "
            f"(`pdserve key TENANT --file FILE` adds one) or {KEYS_VARIABLE}, or insecure = true"
        )
    return is_open


def cluster_token(access: Access, environ: Mapping[str, str] = os.environ) -> str:
    """The token that workers require. Empty: none. Raises ConfigError."""
    return secret_of("access.cluster_token", access.cluster_token, CLUSTER_VARIABLE, environ)


def admin_key(admin: Admin, environ: Mapping[str, str] = os.environ) -> str:
    """The admin key. Raises ConfigError if `admin.port` is set and there is none."""
    key = secret_of("admin.key", admin.key, ADMIN_VARIABLE, environ)
    if not key and admin.port is not None:
        raise ConfigError(f"admin.port needs a key: set admin.key_file, or {ADMIN_VARIABLE}")
    return key


def new_key() -> str:
    """A new API key: `pd-` and 256 random bits."""
    return f"pd-{secrets.token_urlsafe(32)}"


def key_line(tenant: str, key: str) -> str:
    """The line of a keys file for this tenant and key. Raises ConfigError for an invalid tenant name."""
    _check_name("tenant", tenant)
    return f"{tenant} sha256:{digest(key)}\n"


def append_line(file: Path, line: str) -> None:
    """Append a line to a keys file. A new file gets mode 0600. Raises ConfigError."""
    try:
        fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with os.fdopen(fd, "a", encoding="utf-8") as keys:
            keys.write(line)
    except OSError as error:
        raise ConfigError(f"{file}: cannot be written: {error.strerror}") from None


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the keys file {file} cannot be read: {error}") from None


def _add(keys: dict[str, str], where: str, tenant: str, key: str) -> None:
    _check_name(where, tenant)
    found = digest_of_setting(key)
    if not is_digest(found):
        raise ConfigError(f"{where}: after `sha256:` must come 64 hexadecimal digits")
    if not key.startswith("sha256:") and len(key) < MIN_CHARS:
        raise ConfigError(f"{where}: a key has {MIN_CHARS} characters or more; `pdserve key` makes one")
    if keys.setdefault(found, tenant) != tenant:
        raise ConfigError(f"{where}: tenant {tenant} has the key of tenant {keys[found]}")


def _check_name(where: str, tenant: str) -> None:
    if not _NAME.fullmatch(tenant) or tenant == SHARED:
        what = f"{tenant[:64]!r} cannot name a tenant: letters, digits, `.`, `_`, `-`, and not {SHARED!r}"
        raise ConfigError(f"{where}: {what}")


app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def key(
    tenant: Annotated[str, typer.Argument(help="Name of the tenant.")],
    file: Annotated[
        Path | None, typer.Option(help="Keys file (access.keys_file) to add the key's digest to.")
    ] = None,
) -> None:
    """Make an API key and print it, once: only its digest is kept."""
    made = new_key()
    line = key_line(tenant, made)
    if file is not None:
        append_line(file, line)
    typer.echo(made)
    if file is None:
        typer.echo(f"for the keys file: {line}", err=True, nl=False)
