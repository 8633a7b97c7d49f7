"""The compiled module, where it was built."""

from __future__ import annotations

import functools
import importlib
import logging
from types import ModuleType
from typing import Final

logger = logging.getLogger(__name__)

INTERFACE: Final = 2
"""Of the functions' arguments: a module of another number was left behind by an older source."""


@functools.cache
def compiled() -> ModuleType | None:
    """The functions of `_native.pyi`; None, and once a warning, where they were not built."""
    try:
        module = importlib.import_module("pdserve.kvpool.native._native")
        if getattr(module, "INTERFACE", 0) != INTERFACE:
            raise ImportError("it was built from an older source")
    except ImportError as error:
        logger.warning(
            "pages are copied by NumPy, slowly beside a busy engine: the C module was not built (%s). "
            "Install a C compiler, Python's headers, and pdserve again",
            error,
        )
        return None
    return module
