"""`--model-path pdserve://POOL/NAME[@REV]`: SGLang reads configuration, tokenizer and weights from the pool.

SGLang makes a connector for a model path with a scheme, and sets `--load-format remote` by itself. There is
no registry of schemes, so the function that makes connectors is replaced, wherever it was imported to. Ours
is a file connector: it gives Hugging Face names and tensors, and the model's own loader cuts them for each
rank.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from typing import Any, Final

import torch

from pdserve.engine.model_dir import pool_model
from pdserve.errors import PoolError, StartupError, WeightsError
from pdserve.kvpool.weights.manifest import ITEM_BYTES, TensorPlace
from pdserve.kvpool.weights.model import PoolModel
from pdserve.kvpool.weights.names import is_pool_url

_USERS: Final = (
    "sglang.srt.connector",
    "sglang.srt.model_loader.loader",
    "sglang.srt.utils.hf_transformers.config",
    "sglang.srt.utils.hf_transformers.tokenizer",
)
"""Modules that have the function under the name of `_MAKER`."""
_MAKER: Final = "create_remote_connector"


_DTYPES: Final = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
}


def install() -> None:
    """Let SGLang take URLs of pools as model paths, in this process. Imports a small part of SGLang."""
    from sglang.srt import connector

    original = getattr(connector, _MAKER)
    if hasattr(original, "pdserve"):
        return
    connector_class = _connector_class()

    @functools.wraps(original)
    def create(url: Any, device: Any = None, **more: Any) -> Any:
        if isinstance(url, str) and is_pool_url(url):
            return connector_class(url)
        return original(url, device, **more)

    create.pdserve = True  # type: ignore[attr-defined]
    for name in _USERS:
        if name in sys.modules:  # the others will import it from the first
            setattr(sys.modules[name], _MAKER, create)


def tensors(model: PoolModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and tensors (on the CPU) of all weights. Memory that nobody uses any more is used again. Raises
    StartupError.
    """
    try:
        for filled in model.spans():
            memory = torch.from_numpy(filled.data)
            for place in filled.span.tensors:
                yield place.name, tensor_in(memory, filled.offset(place), place)
    except (WeightsError, PoolError) as error:
        raise StartupError(str(error)) from error


def tensor_in(memory: torch.Tensor, offset: int, place: TensorPlace) -> torch.Tensor:
    """The tensor whose bytes begin at `offset` of `memory` (uint8, 1-D), without a copy if it may."""
    dtype = _DTYPES[place.dtype]
    if place.end == place.start:
        return torch.empty(place.shape, dtype=dtype)
    part = memory[offset : offset + place.end - place.start]
    if part.data_ptr() % ITEM_BYTES[place.dtype] or offset % ITEM_BYTES[place.dtype]:
        part = part.clone()
    return part.view(dtype).reshape(place.shape)


@functools.cache
def _connector_class() -> type[Any]:
    """Made late: importing this module imports no SGLang."""
    from sglang.srt.connector.base_connector import BaseFileConnector

    class PoolConnector(BaseFileConnector):  # type: ignore[misc]
        """A model of the pool as SGLang reads one."""

        def __init__(self, url: str) -> None:
            # not the base's: it makes a directory for each connector, and takes over the process's signals
            self.url = url
            self.closed = False
            self._model = pool_model(url)
            self.local_dir = str(self._model.directory)

        def glob(self, allow_pattern: str) -> list[str]:
            """Paths of files, whether they are in the local directory or not."""
            names = [file.path for file in self._model.manifest.files]
            return [f"{self.url}/{name}" for name in names if fnmatch(name, allow_pattern)]

        def pull_files(
            self, allow_pattern: list[str] | None = None, ignore_pattern: list[str] | None = None
        ) -> None:
            """All files but weights are in the local directory already."""

        def weight_iterator(self, rank: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
            """All tensors, whatever the rank: the model's loader takes what it needs."""
            return tensors(self._model)

        def close(self) -> None:
            """The directory stays: it is its process's, and other connectors use it."""
            self.closed = True

    return PoolConnector
