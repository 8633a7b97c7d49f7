"""Checks of a worker's model directory and address, before it loads anything.

Fingerprints of what makes a prompt's pages: model directories, tokenizer and chat template. Workers that
differ in one make other pages of the same prompt, and share none.

Those of directories are kept from start to start: one of a large model takes 270,000 seeks. An entry is found
by everything that tells whether a file was changed: its path, size, inode, and times of change. A directory
with a file that was changed in the last `SETTLED_S` is not kept, since a further change might have the same
times. The entries are in a directory of this user alone.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import xxhash

from pdserve.errors import PoolError, StartupError, WeightsError
from pdserve.kvpool.weights.model import PoolModel, open_model
from pdserve.kvpool.weights.names import is_pool_url
from pdserve.pages import model_fingerprint
from pdserve.security.private_directory import private_directory

logger = logging.getLogger(__name__)

SETTLED_S = 10.0
MAX_ENTRIES = 256
_READ_SUFFIXES = (".json", ".safetensors", ".bin", ".pt", ".gguf")
"""Of the files that a fingerprint is made of."""
_FINGERPRINT = re.compile(r"[0-9a-f]{16}")
SAMPLE: Final = (
    "The quick brown fox, 1234567890 times; Zwölf Boxkämpfer jagen Viktor.\n\tdef f(x): return x**2  # 😀 "
    "日本語のテキスト русский текст النص العربي <|im_start|>user<|im_end|></s>"
)


def default_directory() -> Path:
    """`$XDG_CACHE_HOME/pdserve/fingerprints`, or below `~/.cache`. Raises RuntimeError without a home."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base.startswith("/") else Path.home() / ".cache") / "pdserve" / "fingerprints"


def kept_fingerprint(model_path: Path, compute: Callable[[Path], str], directory: Path | None = None) -> str:
    """`compute(model_path)`, or what it was when the same files were there. Raises what `compute` raises."""
    try:
        directory = directory or default_directory()
        stamp, changed_s = _stamp(model_path)
        private_directory(directory, checks_parents=False)
        entry = directory / hashlib.sha256(f"{compute.__name__}\n{stamp}".encode()).hexdigest()
        if (found := _read(entry)) is not None:
            return found
    except (OSError, RuntimeError) as error:
        logger.debug("fingerprints are not kept: %s", error)
        return compute(model_path)
    fingerprint = compute(model_path)
    try:
        if _stamp(model_path)[0] == stamp and changed_s < time.time() - SETTLED_S:
            _write(entry, fingerprint)
    except OSError as error:
        logger.debug("the fingerprint of %s is not kept: %s", model_path, error)
    return fingerprint


def _stamp(model_path: Path) -> tuple[str, float]:
    """The state of the directory's files, and when the last of them was changed."""
    lines, changed_ns = [str(model_path.resolve())], 0
    for path in sorted(model_path.iterdir()):
        if path.suffix in _READ_SUFFIXES:
            of = path.stat()
            lines.append(
                f"{path.name!r} {of.st_dev} {of.st_ino} {of.st_size} {of.st_mtime_ns} {of.st_ctime_ns}"
            )
            changed_ns = max(changed_ns, of.st_mtime_ns, of.st_ctime_ns)
    return "\n".join(lines), changed_ns / 1e9


def _read(entry: Path) -> str | None:
    try:
        said = entry.read_text(encoding="ascii")
    except (FileNotFoundError, UnicodeDecodeError):
        return None
    return said if _FINGERPRINT.fullmatch(said) else None


def _write(entry: Path, fingerprint: str) -> None:
    """Whole or not at all. The oldest entries make room."""
    part = entry.with_name(f"{entry.name}.{os.getpid()}")
    part.write_text(fingerprint, encoding="ascii")
    part.replace(entry)
    entries = sorted(entry.parent.iterdir(), key=lambda path: path.stat().st_mtime_ns)
    for old in entries[:-MAX_ENTRIES]:
        old.unlink(missing_ok=True)


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Of the tokens of a sample and the size of the vocabulary; empty without a tokenizer."""
    if tokenizer is None:
        return ""
    said = [*tokenizer.encode(SAMPLE), len(tokenizer)]
    return str(xxhash.xxh3_64_hexdigest(repr(said).encode()))


def chat_template_fingerprint(tokenizer: Any, named: str | None) -> str:
    """Of the model's own template, and of the one that SGLang was told to use (`--chat-template`)."""
    own = getattr(tokenizer, "chat_template", None)
    return str(xxhash.xxh3_64_hexdigest(repr((own, named)).encode())) if own or named else "none"


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
            "or make one: python -m pdserve.engine.demo DIRECTORY"
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
