"""Records of format version 1, whose pages have the number of a namespace instead of a space.

A number may have meant another namespace in an older segment, and pages of a number were voided by sequence.
Version 1 stored this in two files, which are read once, when this version first opens the tier:

    origins.json      the first segment in which a number means the namespace of the saved list
    forgotten.json    the sequence below which pages of a number are void

The resulting rules are stored in `version1.json`, with the space of each number. Clearing or dropping a
namespace changes its space, so the rules never grow. The file is removed with the last segment of version 1.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from pdserve.kvpool.tiers.durable_files import load_json, read_text, write_durably

VOID: Final = 0  # a space of no namespace
_NO_OLD_VERSION: Final = '"pages are named by spaces here"'


class NumberRule(msgspec.Struct, frozen=True):
    """The valid pages of a number, and their space."""

    space: int
    first_segment: int
    first_sequence: int


class _Origins(msgspec.Struct, frozen=True):
    """origins.json: first segment by number, and that of all other numbers. Segments count from 1."""

    numbers: dict[int, int] = {}
    others: int = 1


class NumberedPages:
    """The rules for records of version 1 in the tier at `path`."""

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
        """The space of a record in this segment. VOID: the record is not valid."""
        rule = self._rules.get(number)
        if rule is None or segment < rule.first_segment or sequence < rule.first_sequence:
            return VOID
        return rule.space

    def adopt(self, spaces: Mapping[int, int]) -> str:
        """See `NumberedTier`. Repeatable: the rules keep the contents of the two files."""
        done = read_text(self._forgotten_file) == _NO_OLD_VERSION
        before = self._rules if done else self._read_version_1(set(spaces))
        self._rules = {
            number: msgspec.structs.replace(rule, space=spaces[number])
            for number, rule in before.items()
            if number in spaces
        }
        text = msgspec.json.encode(self._rules).decode()
        # an older version of pdserve that starts here later must find no list of its own
        problem = write_durably(self._rules_file, text) or write_durably(
            self._forgotten_file, _NO_OLD_VERSION
        )
        if problem:
            self._rules = {}
        return problem

    def end(self) -> None:
        """Remove the rules: the last segment of version 1 is gone."""
        if self._rules:
            self._rules = {}
            with contextlib.suppress(OSError):  # without such segments it has no effect
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
