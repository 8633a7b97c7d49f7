"""The package that SGLang imports models from (SGLANG_EXTERNAL_MODEL_PACKAGE). It holds this worker's model
only, where SGLang's own package has 259 modules. SGLang imports those too once it asks for another model.
"""

from __future__ import annotations

import os
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Final

PACKAGE_ENV: Final = "SGLANG_EXTERNAL_MODEL_PACKAGE"
CLASSES_ENV: Final = "PDSERVE_MODEL_CLASSES"
"""Inherited by schedulers: MODULE:CLASS, separated by spaces."""
_ENTRY: Final = re.compile(r"^EntryClass\b[^=]*=\s*(\[[^]]*\]|\w+)", re.MULTILINE)


def choose(architectures: list[str]) -> None:
    """Have SGLang import the modules of these classes only. Where one is not found, or the user names a
    package of models, nothing changes. Imports no SGLang.
    """
    found = [where for name in architectures if (where := _module_of(name))]
    if found and len(found) == len(architectures):
        os.environ[CLASSES_ENV] = " ".join(found)
        os.environ.setdefault(PACKAGE_ENV, __name__)


def _module_of(name: str) -> str:
    """MODULE:CLASS; empty: there is none, or there are several."""
    spec = find_spec("sglang")
    assert spec is not None
    assert spec.origin is not None
    word = re.compile(rf"\b{re.escape(name)}\b")
    files = sorted(Path(spec.origin).parent.glob("srt/models/*.py"))
    found = [file.stem for file in files if _names(file.read_text(encoding="utf-8"), name, word)]
    return f"sglang.srt.models.{found[0]}:{name}" if len(found) == 1 else ""


def _names(text: str, name: str, word: re.Pattern[str]) -> bool:
    return name in text and any(word.search(entry) for entry in _ENTRY.findall(text))
