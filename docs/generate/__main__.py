"""`python -m docs.generate`: name the pages that are not current (status 1); `--write`: write them."""

from __future__ import annotations

import sys

from docs.generate.pages import generated, stale
from docs.generate.product import ROOT


def main(words: list[str]) -> int:
    """Check or write all generated pages; the exit status."""
    if words not in ([], ["--write"]):
        print("usage: python -m docs.generate [--write]", file=sys.stderr)
        return 2
    if words:
        for path, text in generated().items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        return 0
    found = stale()
    for path in found:
        print(f"{path.relative_to(ROOT)} is not current: run launch/docs.sh --write", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
