"""The table of models and features is made of markers at tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs.generate.product import ROOT
from docs.generate.reference.models import FAMILIES, Seen, all_seen, page

TEST = """
import pytest
pytestmark = [pytest.mark.e2e]
@pytest.mark.model_support("multi-head attention", "pool")
@pytest.mark.parametrize(
    "x", [pytest.param(1, marks=pytest.mark.model_support("state layers", "TP", refused="no"))]
)
def test_it(x): ...
"""


def test_markers_are_found_at_tests_and_at_their_parameters(tmp_path: Path) -> None:
    (tmp_path / "test_x.py").write_text(TEST)
    (tmp_path / "test_y.py").write_text(TEST.replace("pytest.mark.e2e", "pytest.mark.long"))
    found = {(one.family, one.feature, one.is_end_to_end, one.refused) for one in all_seen(tmp_path)}
    assert found == {
        ("multi-head attention", "pool", True, ""),
        ("multi-head attention", "pool", False, ""),
        ("state layers", "TP", True, "no"),
        ("state layers", "TP", False, "no"),
    }


@pytest.mark.parametrize(
    "words", ['"magic", "pool"', '"multi-head attention", "magic"', '"multi-head attention"', 'name, "pool"']
)
def test_a_cell_that_there_is_not_is_an_error_that_names_the_test(tmp_path: Path, words: str) -> None:
    (tmp_path / "test_x.py").write_text(
        f"import pytest\n\n@pytest.mark.model_support({words})\ndef test_it(): ...\n"
    )
    with pytest.raises(ValueError, match=r"test_x.py:3: "):
        list(all_seen(tmp_path))


def test_the_page_has_a_row_for_each_family_that_a_test_names() -> None:
    seen: list[Seen] = list(all_seen(ROOT / "tests"))
    families = {one.family for one in seen}
    text = page()
    assert {family for family in FAMILIES if f"| {family}: " in text} == families
    assert all(f"`{one.refused}`" in text for one in seen if one.refused)
