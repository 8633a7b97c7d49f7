"""Names of models in a pool: `NAME[@REV]`, and the URL `pdserve://POOL/NAME[@REV]`. Pure.

POOL is the name of the pool that a worker is configured with (`pool.cluster`), or the address of one of its
nodes: `HOST:PORT`, or `unix:/path`. A revision never changes: other files need another revision.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from pdserve.errors import ConfigError

SCHEME: Final = "pdserve://"
DEFAULT_REVISION: Final = "main"
_WORD: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")


class ModelName(NamedTuple):
    """One revision of one model."""

    name: str
    revision: str = DEFAULT_REVISION

    def __str__(self) -> str:
        return f"{self.name}@{self.revision}"


class ModelUrl(NamedTuple):
    """Where a model is."""

    pool: str
    model: ModelName

    @property
    def address(self) -> str | None:
        """The control address of a node, where `pool` is one."""
        if self.pool.startswith("unix:"):
            return self.pool
        return f"tcp:{self.pool}" if ":" in self.pool else None


def parse_model(text: str) -> ModelName:
    """Raises ConfigError."""
    name, at, revision = text.partition("@")
    words = [name, revision] if at else [name]
    if not all(_WORD.fullmatch(word) for word in words):
        raise ConfigError(
            f"{text!r} is no NAME or NAME@REV: each has up to 96 letters, digits, dots, dashes and "
            "underscores, and begins with a letter or a digit"
        )
    return ModelName(*words)


def is_pool_url(text: str) -> bool:
    """Whether a model path names a model in a pool."""
    return text.startswith(SCHEME)


def parse_url(text: str) -> ModelUrl:
    """Raises ConfigError."""
    pool, slash, model = text.removeprefix(SCHEME).rpartition("/")
    if not is_pool_url(text) or not slash or not pool or not pool.isprintable() or " " in pool:
        raise ConfigError(f"{text!r} is no {SCHEME}POOL/NAME[@REV]: POOL is a pool's name, or HOST:PORT")
    return ModelUrl(pool, parse_model(model))
