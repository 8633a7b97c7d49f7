"""SGLang's own loaders of weights, without a model: what the pool's loading is measured beside."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from pdserve.errors import StartupError

_MODULE: Final = "sglang.srt.model_loader.weight_utils"
LOADERS: Final = {"auto": "", "fastsafetensors": "fastsafetensors", "runai_streamer": "runai_model_streamer"}
"""Values of --load-format, each with the package that it needs beside SGLang."""


def is_installed(loader: str) -> bool:
    """Whether the loader's own package is there."""
    package = LOADERS[loader]
    return not package or importlib.util.find_spec(package) is not None


def imported() -> None:
    """Import SGLang's loaders now, so that no load is measured with it."""
    importlib.import_module(_MODULE)
    importlib.import_module("sglang.srt.model_loader.loader")


def weights(loader: str, directory: Path) -> Iterator[tuple[str, Any]]:
    """Names and tensors of a model's directory. Raises StartupError where the loader cannot run here."""
    from sglang.srt.model_loader import weight_utils
    from sglang.srt.model_loader.loader import DefaultModelLoader

    files = [str(path) for path in sorted(directory.glob("*.safetensors"))]
    try:
        if loader == "auto":
            threads = DefaultModelLoader.DEFAULT_NUM_THREADS
            yield from weight_utils.buffered_multi_thread_safetensors_weights_iterator(files, threads)
        elif loader == "fastsafetensors":
            yield from weight_utils.fastsafetensors_weights_iterator(files)
        else:
            yield from weight_utils.runai_safetensors_weights_iterator(files)
    except (ImportError, RuntimeError, AssertionError) as error:
        raise StartupError(f"--load-format {loader} does not run here: {error}") from error
