"""Checks of a worker's model directory and address, before it loads anything."""

from __future__ import annotations

import errno
import json
import socket
from pathlib import Path
from typing import Any

from pdserve.engine.fingerprints import kept_fingerprint
from pdserve.errors import PoolError, StartupError, WeightsError
from pdserve.kvpool.weights.model import PoolModel, open_model
from pdserve.kvpool.weights.names import is_pool_url
from pdserve.pages import model_fingerprint

_WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")
NOT_HERE = frozenset({errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT})
"""Of an address that this machine does not have: /etc/hosts names ::1 also where IPv6 is turned off."""


def check_model_dir(model_path: str) -> dict[str, Any]:
    """The object in the model's config.json, with its `architectures`.

    Raises StartupError unless `model_path` is a Hugging Face model directory with configuration and weights,
    or names a model of a pool that has them.
    """
    if is_pool_url(model_path):
        return _read_config(pool_model(model_path).directory / "config.json", model_path)
    path = Path(model_path)
    if not path.exists():
        raise StartupError(
            f"model path {model_path} does not exist: give a local Hugging Face model directory, "
            "or make one with 'pdserve model demo'"
        )
    config = _read_config(path / "config.json", model_path)
    if not any(next(path.glob(pattern), None) for pattern in _WEIGHTS):
        raise StartupError(f"model path {model_path} has no weights ({', '.join(_WEIGHTS)})")
    return config


def pool_model(model_path: str) -> PoolModel:
    """The model of a pool that a URL names; its small files are in its directory. Raises StartupError,
    ConfigError.
    """
    try:
        return open_model(model_path)
    except (WeightsError, PoolError) as error:
        raise StartupError(str(error)) from error


def fingerprint_of(model_path: str) -> str:
    """What a model's pages are named after: of its directory, or of the one that it was pushed from. So
    workers share pages wherever they got the weights. Raises StartupError, ConfigError.
    """
    if not is_pool_url(model_path):
        if not Path(model_path).is_dir():
            raise StartupError(
                f"model {model_path!r} is no local directory: download it first, and give its path"
            )
        return kept_fingerprint(Path(model_path), model_fingerprint)
    if found := pool_model(model_path).manifest.fingerprint:
        return found
    raise StartupError(f"{model_path} was pushed from a directory without a config.json or weights")


def _read_config(config: Path, model_path: str) -> dict[str, Any]:
    if not config.is_file():
        raise StartupError(
            f"model path {model_path} is no Hugging Face model directory: it has no config.json"
        )
    try:
        found: dict[str, Any] = json.loads(config.read_text(encoding="utf-8"))
        architectures = found.get("architectures")
    except (OSError, ValueError, AttributeError) as error:
        raise StartupError(f"{config} cannot be read: {error}") from error
    if not architectures:
        raise StartupError(f"{config} names no model architecture: is this a Hugging Face model directory?")
    return found


def bind_address(host: str, port: int) -> list[socket.socket]:
    """Sockets bound to all addresses that `host` names and this machine has; the caller closes them. No
    other process can take the port until they listen, which the caller allows by setting SO_REUSEADDR
    again: without it listen() fails beside connections of an earlier process that are still in TIME_WAIT.
    Raises StartupError.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise StartupError(f"cannot listen on {host}: {error.strerror}; set engine.host") from error
    bound: list[socket.socket] = []
    lacking: OSError | None = None
    try:
        for family, kind, _, _, address in found:
            try:
                bound.append(_bind(socket.socket(family, kind), address))
            except OSError as error:
                if error.errno not in NOT_HERE:
                    raise
                lacking = error
        if not bound and lacking is not None:
            raise lacking
    except OSError as error:
        for one in bound:
            one.close()
        if error.errno == errno.EADDRINUSE:
            raise StartupError(
                f"port {port} on {host} is in use: stop what listens there or set engine.port"
            ) from error
        raise StartupError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    return bound


def _bind(made: socket.socket, address: Any) -> socket.socket:
    try:
        if made.family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    except OSError:
        made.close()
        raise
    return made
