"""Imports of transformers without a step that costs a worker 0.7 s of a core.

transformers asks to which distribution each installed package belongs. Python parses the long description of
every distribution for that, though its name and its list of files answer it.
"""

from __future__ import annotations

import importlib.metadata
import re
from typing import Final

_NAME: Final = re.compile(r"^Name:\s*(.+?)\s*$", re.MULTILINE)
_MODULE: Final = re.compile(r"^([^/,\n]+)(?:/[^,\n]*)?\.py,", re.MULTILINE)  # of RECORD


def install() -> None:
    """Before anything imports transformers; again is a no-op."""
    importlib.metadata.packages_distributions = packages_distributions


def packages_distributions() -> dict[str, list[str]]:
    """What Python's own function says, for installed wheels."""
    found: dict[str, list[str]] = {}
    for one in importlib.metadata.distributions():
        name = _NAME.search(one.read_text("METADATA") or one.read_text("PKG-INFO") or "")
        packages = {*(one.read_text("top_level.txt") or "").split()}
        for package in packages or {*_MODULE.findall(one.read_text("RECORD") or "")}:
            found.setdefault(package, []).append(name[1] if name else "")
    return found
