"""Records of format version 1, whose pages carry the number of a namespace in place of a space.

A number may have meant another namespace in an older segment, and pages of a number were voided by sequence.
Version 1 kept that in two files, which are read once, when the tier is first opened by this version:

    origins.json      from which segment on a number means the namespace of the list that was saved with it
    forgotten.json    below which sequence the pages of a number are void

What follows from them is kept in `version1.json`, with the space that each number stands for. Clearing or
dropping a namespace changes its space, so nothing is ever added there. The file goes with the last segment of
version 1.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from pdserve.kvpool.tiers.durable_files import load_json, read_text, write_durably

VOID: Final = 0  # the space of no namespace
_NO_OLD_VERSION: Final = '"pages are named by spaces here"'


class NumberRule(msgspec.Struct, frozen=True):
    """Which pages of a number count, and the space that they are in."""

    space: int
    first_segment: int
    first_sequence: int


class _Origins(msgspec.Struct, frozen=True):
    """origins.json: a first segment by number, and that of all other numbers. Segments count from 1."""

    numbers: dict[int, int] = {}
    others: int = 1


class NumberedPages:
    """What the tier at `path` knows of its records of version 1."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rules: dict[int, NumberRule] = load_json(self._rules_file, dict[int, NumberRule], {}) or {}

    @property
    def _rules_file(self) -> Path:
        return self._path / "version1.json"

    @property
    def _forgotten_file(self) -> Path:
        return self._path / "forgotten.json"

    def space(self, number: int, segment: int, sequence: int) -> int:
        """Of a record in this segment, VOID when it counts no more."""
        rule = self._rules.get(number)
        if rule is None or segment < rule.first_segment or sequence < rule.first_sequence:
            return VOID
        return rule.space

    def adopt(self, spaces: Mapping[int, int]) -> str:
        """See `NumberedTier`. It may be done again: what the two files said is kept in the rules."""
        done = read_text(self._forgotten_file) == _NO_OLD_VERSION
        before = self._rules if done else self._read_version_1(set(spaces))
        self._rules = {
            number: msgspec.structs.replace(rule, space=spaces[number])
            for number, rule in before.items()
            if number in spaces
        }
        text = msgspec.json.encode(self._rules).decode()
        # an older program that is started here again finds nothing that it could take for its own
        problem = write_durably(self._rules_file, text) or write_durably(
            self._forgotten_file, _NO_OLD_VERSION
        )
        if problem:
            self._rules = {}
        return problem

    def end(self) -> None:
        """There is no segment of version 1 any more."""
        if self._rules:
            self._rules = {}
            with contextlib.suppress(OSError):  # it stands for nothing any more
                self._rules_file.unlink()

    def _read_version_1(self, numbers: set[int]) -> dict[int, NumberRule]:
        forgotten = load_json(self._forgotten_file, dict[int, int], {})
        origins = load_json(self._path / "origins.json", _Origins, _Origins())
        if forgotten is None or origins is None:
            return {}
        return {
            number: NumberRule(VOID, origins.numbers.get(number, origins.others), forgotten.get(number, 0))
            for number in numbers
        }
