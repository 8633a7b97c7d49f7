"""A revision's files in a directory: all of them (`pull`), or the small ones that SGLang reads by path."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, MutableMapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Final

from pdserve.errors import WeightsError
from pdserve.kvpool.protocol.page_bytes import aligned
from pdserve.kvpool.weights.manifest import FileEntry, Manifest, is_named
from pdserve.kvpool.weights.store import PageReader
from pdserve.kvpool.weights.streaming import batches
from pdserve.security.private_directory import private_directory

WEIGHTS: Final = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
"""Files that are not needed beside a stream of tensors."""
MODE: Final = 0o644
LOCK: Final = ".pdserve-pull.lock"
"""Hidden, so that `push` leaves it out. It stays: one process could lock a removed file that it had opened
before, while another one locks the next of that name.
"""
FILES_VARIABLE: Final = "PDSERVE_WEIGHTS_FILES"
"""Directory of small files, which this process and its children share."""


def is_small(file: FileEntry) -> bool:
    """Whether the file is one that SGLang reads by its path: configuration, tokenizer, code."""
    return not any(fnmatch(file.path.rpartition("/")[2], pattern) for pattern in WEIGHTS)


@contextlib.contextmanager
def alone_in(directory: Path) -> Iterator[None]:
    """No other process pulls into the directory, until the block is left or this process has ended. Two at
    once would leave files of two revisions. Raises WeightsError where one does, or nothing can be locked.
    """
    path = directory / LOCK
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, MODE)
    except OSError as error:
        raise WeightsError(f"{path}: {error.strerror or error}") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise WeightsError(
                f"{directory}: another pull writes there: pull again when it has ended"
            ) from None
        except OSError as error:
            raise WeightsError(f"{path} cannot be locked: {error.strerror or error}") from error
        yield
    finally:
        os.close(descriptor)


def write_files(
    reader: PageReader, manifest: Manifest, directory: Path, wanted: Callable[[FileEntry], bool]
) -> int:
    """Write files below `directory`, each whole under its name or not at all. Returns their number. Raises
    WeightsError.
    """
    chosen = [file for file in manifest.files if wanted(file)]
    for file in chosen:
        target = directory / file.path  # `manifest.is_inner_path`: it stays below
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            if not target.parent.resolve().is_relative_to(directory.resolve()):
                raise WeightsError(f"{target.parent} leads out of {directory} by a link: remove the link")
            _write(reader, file, target)
        except OSError as error:
            raise WeightsError(f"{target}: {error.strerror or error}") from error
    return len(chosen)


def _write(reader: PageReader, file: FileEntry, target: Path) -> None:
    place, placed = 0, []
    for piece in file.pieces:
        placed.append((place, piece))
        place += piece.length
    descriptor, part = tempfile.mkstemp(prefix=".part-", dir=target.parent)
    try:
        with os.fdopen(descriptor, "wb") as out:
            for batch in batches(placed):
                first, pieces = batch[0][0], [piece for _, piece in batch]
                data = aligned(sum(piece.length for piece in pieces))
                into = [data[at - first : at - first + piece.length] for at, piece in batch]
                reader.read(file.path, pieces, into)
                for piece, found in zip(pieces, into, strict=True):
                    if not is_named(found, piece):
                        raise WeightsError(
                            f"{file.path}: page {piece.key.hex()[:16]} has other bytes: push it again"
                        )
                out.write(data.data)
        Path(part).chmod(MODE)  # a directory that others cannot enter keeps them out
        Path(part).replace(target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            Path(part).unlink()
        raise


def shared_directory(environ: MutableMapping[str, str] = os.environ) -> Path:
    """A directory for small files, which goes with the process that made it. Its children find it by the
    environment, so that a worker has these files once. Raises WeightsError.
    """
    if said := environ.get(FILES_VARIABLE, ""):
        return Path(said)
    base = Path(tempfile.gettempdir()) / f"pdserve-{os.geteuid()}"
    try:
        private_directory(base)
        for name in _left_behind(base):
            shutil.rmtree(base / name, ignore_errors=True)
        made = _locked_directory(base)
    except OSError as error:
        raise WeightsError(
            f"no place for a model's small files: {error.strerror or error}; set TMPDIR"
        ) from error
    environ[FILES_VARIABLE] = str(made)
    owner = os.getpid()

    def remove() -> None:
        if os.getpid() == owner:  # and not in a child that was forked
            shutil.rmtree(made, ignore_errors=True)

    atexit.register(remove)
    return made


def _locked_directory(base: Path) -> Path:
    """A new directory, locked until this process and its forked children have ended. It has its name once it
    is locked: from then on others look at it.
    """
    made = Path(tempfile.mkdtemp(prefix=f"new-weights-{os.getpid()}-", dir=base))
    descriptor = os.open(made, os.O_RDONLY | os.O_DIRECTORY)  # open until the process ends
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return made.rename(base / made.name.removeprefix("new-"))


def _left_behind(base: Path) -> Iterator[str]:
    """Directories of processes that ended without removing them: nobody holds their lock. Process ids say
    nothing: another container may share the directory and count its own.
    """
    for path in base.glob("weights-*-*"):
        with contextlib.suppress(OSError):  # somebody holds it, or it is gone
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                yield path.name
            finally:
                os.close(descriptor)
