"""Models and machines of tests/capacity, as directories and facts."""

from __future__ import annotations

import json
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "capacity"
MACHINES = FOLDER / "machines"


def make_model(directory: Path, name: str) -> Path:
    """A directory with the model's config.json, and an index in place of its weights."""
    facts = json.loads((FOLDER / "models" / f"{name}.json").read_text())
    path = directory / name
    path.mkdir()
    (path / "config.json").write_text(json.dumps(facts["config"]))
    index = {"metadata": {"total_size": facts["weight_bytes"]}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path
