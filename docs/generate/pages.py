"""Which pages are generated, and what should stand in them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from docs.generate.markdown import with_block
from docs.generate.product import ROOT
from docs.generate.reference import cli, formats, metrics, models, options

NOTE: Final = "\n<!-- Written by `launch/docs.sh --write`: do not edit. -->\n"
WHOLE: Final[Mapping[str, Callable[[], str]]] = {
    "docs/reference/options.md": options.page,
    "docs/reference/metrics.md": metrics.page,
    "docs/reference/cli.md": cli.page,
    "docs/reference/models.md": models.page,
}
BLOCKS: Final[Mapping[str, Mapping[str, Callable[[], str]]]] = {
    "docs/internals/pool-protocol.md": {"messages": formats.messages},
    "docs/internals/slot-table.md": {"rows": formats.slot_rows},
    "docs/internals/tier-format.md": {"entries": formats.segment_entries},
}


def generated() -> dict[Path, str]:
    """Every page that has generated parts, as it should be. Raises ValueError where a marker is missing."""
    found = {ROOT / name: make().rstrip("\n") + "\n" + NOTE for name, make in WHOLE.items()}
    for name, blocks in BLOCKS.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        for block, make in blocks.items():
            text = with_block(text, block, make())
        found[ROOT / name] = text
    return found


def stale() -> list[Path]:
    """Pages that are not as they should be."""
    return [
        path
        for path, text in generated().items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    ]
