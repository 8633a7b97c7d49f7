"""One load of a model's weights in a fresh process, as a rank of SGLang does it: every tensor is copied into
memory that is there already, as a model's parameters are. Prints one JSON line, the last one.

    python -m benchmarks.pool.weights_load.loading_process FILE
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import xxhash

from benchmarks.processes import read_config
from pdserve.engine.sglang import prepare

POOL: Final = "pool"


class LoadJob(msgspec.Struct, frozen=True, kw_only=True):
    """`loader`: one of SGLang's, or POOL. `model_path`: a directory or URL. `size_bytes`: of all tensors."""

    loader: str
    model_path: str
    size_bytes: int


class Loaded(msgspec.Struct, frozen=True, kw_only=True):
    """`seconds`: from the first question to the last byte in its place. `first_s`: to the first tensor.
    `digest`: of all tensors, the same wherever they came from.
    """

    seconds: float
    first_s: float
    size_bytes: int
    digest: str


def load(job: LoadJob) -> Loaded:
    """Raises StartupError, ConfigError."""
    import torch

    memory = torch.ones(job.size_bytes, dtype=torch.uint8)  # its pages are there
    tensors = _tensors(job)
    places: dict[str, tuple[int, int]] = {}
    at, first_s = 0, 0.0
    begin_s = time.perf_counter()
    for name, tensor in tensors:
        if not places:
            first_s = time.perf_counter() - begin_s
        if size := tensor.numel() * tensor.element_size():
            memory[at : at + size].copy_(tensor.contiguous().reshape(-1).view(torch.uint8))
        places[name] = (at, size)
        at += size
    seconds = time.perf_counter() - begin_s
    digest = xxhash.xxh3_128()
    for name in sorted(places):
        start, size = places[name]
        digest.update(name.encode())
        digest.update(memory[start : start + size].numpy().data)
    return Loaded(seconds=seconds, first_s=first_s, size_bytes=at, digest=digest.hexdigest())


def _tensors(job: LoadJob) -> Iterator[tuple[str, Any]]:
    """Nothing is read before the first one is asked for; what is imported for it is imported now."""
    from pdserve.engine.model_dir import pool_model
    from pdserve.engine.sglang.pool_weights import tensors
    from pdserve.engine.sglang.trials import weight_loaders

    if job.loader == POOL:

        def of_pool() -> Iterator[tuple[str, Any]]:
            yield from tensors(pool_model(job.model_path))

        return of_pool()
    weight_loaders.imported()
    return weight_loaders.weights(job.loader, Path(job.model_path))


def main(path: str) -> None:
    prepare.choose("cpu")
    print(msgspec.json.encode(load(read_config(path, LoadJob))).decode(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
