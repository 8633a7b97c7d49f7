"""A tiny model with sliding windows: the demo model's weights, in layers that a test chooses.

SGLang keeps the layers with a window in a host pool of their own.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Final

from pdserve.engine.demo.model import FULL, SLIDING, with_windows

WINDOW_TOKENS: Final = 128
LAYERS: Final = (SLIDING, FULL, SLIDING, SLIDING)


def make_hybrid_model(demo: Path, directory: Path, layers: tuple[str, ...] = LAYERS) -> Path:
    """`demo`: the tiny demo model's directory. Returns `directory`."""
    shutil.copytree(demo, directory, ignore=shutil.ignore_patterns("pdserve_demo.json"))
    path = directory / "config.json"
    path.write_text(json.dumps(with_windows(json.loads(path.read_text()), WINDOW_TOKENS, layers)))
    return directory
