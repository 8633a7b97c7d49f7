"""Fingerprints of what makes a prompt's pages: model directories, tokenizer and chat template. Workers that
differ in one make other pages of the same prompt, and share none.

Those of directories are kept from start to start: one of a large model takes 270,000 seeks. An entry is found
by everything that tells whether a file was changed: its path, size, inode, and times of change. A directory
with a file that was changed in the last `SETTLED_S` is not kept, since a further change might have the same
times. The entries are in a directory of this user alone.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import xxhash

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
