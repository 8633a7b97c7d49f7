"""The launch scripts, and stand-ins for the programs that they call."""

from __future__ import annotations

from pathlib import Path

LAUNCH = Path(__file__).parents[3] / "launch"


def program(path: Path, lines: str) -> None:
    """A few lines of bash in the place of a program."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{lines}\n")
    path.chmod(0o755)
