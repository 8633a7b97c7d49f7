"""README.md says what the code says."""

from __future__ import annotations

from tests.support.readme import README, generated


def test_the_generated_parts_of_the_readme_are_current() -> None:
    text = README.read_text()
    assert generated(text) == text, "run `python -m tests.support.readme`"
