"""A model of a pool in this process: its manifest, its small files in a directory, its tensors.

SGLang resolves a model's path some ten times at a start, in several processes. The first one writes the small
files and the manifest into the directory that they share; the others read them there. So all of them have
the same revision, whatever happens in the pool meanwhile: content is found by what it is.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from pdserve.errors import WeightsError
from pdserve.kvpool.weights.files import is_small, shared_directory, write_files
from pdserve.kvpool.weights.manifest import Manifest
from pdserve.kvpool.weights.names import ModelUrl, parse_url
from pdserve.kvpool.weights.place import pool_of
from pdserve.kvpool.weights.store import WeightStore
from pdserve.kvpool.weights.streaming import Filled, raise_first, stream, weight_files

MANIFEST: Final = ".pdserve-manifest"
"""Written last into the directory of small files."""


class PoolModel(NamedTuple):
    """`directory`: all files but weights."""

    url: ModelUrl
    manifest: Manifest
    directory: Path

    def spans(self, environ: MutableMapping[str, str] = os.environ) -> Iterator[Filled]:
        """All tensors, read ahead. Raises WeightsError, PoolError. Close it to stop reading."""
        with WeightStore(pool_of(self.url, environ)) as store:
            reader = store.reader(self.manifest.model)
            yield from stream(reader, self.manifest, weight_files(reader, self.manifest))


def open_model(url: str, environ: MutableMapping[str, str] = os.environ) -> PoolModel:
    """The model of `pdserve://POOL/NAME[@REV]`. Raises ConfigError, WeightsError, PoolError."""
    parsed = parse_url(url)
    directory = shared_directory(environ) / hashlib.sha256(url.encode()).hexdigest()[:16]
    if (known := _known(directory)) is not None:
        return PoolModel(parsed, known, directory)
    with WeightStore(pool_of(parsed, environ)) as store:
        manifest = store.manifest(parsed.model)
        reader = store.reader(parsed.model)
        weights = weight_files(reader, manifest)  # one without is refused here, and not in a scheduler
        write_files(reader, manifest, directory, is_small)
        raise_first(reader, weights)
    _keep(directory, manifest)
    return PoolModel(parsed, manifest, directory)


def _known(directory: Path) -> Manifest | None:
    try:
        return msgspec.msgpack.decode((directory / MANIFEST).read_bytes(), type=Manifest)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        raise WeightsError(f"{directory / MANIFEST} cannot be read: {error}: remove it") from error


def _keep(directory: Path, manifest: Manifest) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        descriptor, part = tempfile.mkstemp(prefix=".part-", dir=directory)
        with os.fdopen(descriptor, "wb") as out:
            out.write(msgspec.msgpack.encode(manifest))
        Path(part).replace(directory / MANIFEST)
    except OSError as error:
        raise WeightsError(f"{directory}: {error.strerror or error}") from error
