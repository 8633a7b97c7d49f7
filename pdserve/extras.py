"""Optional libraries: what to install where a feature is configured whose library is not there."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from functools import cache
from typing import Final

from pdserve.errors import ConfigError

_LIBRARIES: Final = {
    "sglang": "sglang",
    "ucx": "ucxx",
    "encryption": "cryptography",
    "bench": "matplotlib",
    "otel": "opentelemetry.sdk",
}


def how_to_install(extra: str) -> str:
    """The command that adds an extra of pyproject.toml to an environment with pdserve."""
    return f"pip install 'pdserve[{extra}]'"


@contextlib.contextmanager
def needed_by(feature: str, extra: str) -> Iterator[None]:
    """Around the imports of a feature's libraries. Raises ConfigError with what to install where one is
    missing or cannot be loaded. `feature`: the option or command that asks for it.
    """
    try:
        yield
    except ImportError as error:
        raise ConfigError(f"{feature} needs a library ({error}): {how_to_install(extra)}") from error


@cache
def is_installed(extra: str) -> bool:
    """Whether an extra's library is there. It is not loaded."""
    try:
        return importlib.util.find_spec(_LIBRARIES[extra]) is not None
    except ModuleNotFoundError:  # of the package that it is in
        return False
