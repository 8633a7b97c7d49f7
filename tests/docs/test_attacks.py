"""docs/security.md shows the attacks that the hostile cluster is tried with, and their number."""

from __future__ import annotations

from docs.generate.markdown import with_block
from docs.generate.product import ROOT
from tests.support.netns import attacks


def test_the_documents_show_the_attacks_that_are_tried() -> None:
    page = (ROOT / "docs/security.md").read_text(encoding="utf-8")
    made = with_block(page, "attacks", attacks.as_markdown())
    assert page == made, f"put this between the markers:\n{attacks.as_markdown()}"
