"""The compiled module, where it was built."""

from __future__ import annotations

import functools
import importlib
import logging
from types import ModuleType

logger = logging.getLogger(__name__)


@functools.cache
def compiled() -> ModuleType | None:
    """The functions of `_native.pyi`; None, and once a warning, where they were not built."""
    try:
        return importlib.import_module("pdserve.kvpool.native._native")
    except ImportError as error:
        logger.warning(
            "pages are copied by NumPy, slowly beside a busy engine: the C module was not built (%s). "
            "Install a C compiler, Python's headers, and pdserve again",
            error,
        )
        return None
