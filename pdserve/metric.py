"""Prometheus metrics by a list of definitions: what a part counts stands in one place, with what it means.
The README's table, and the families that `/metrics` shows, are made from it. Pure.

A name begins with its part's prefix, ends with its unit in base units (seconds, bytes, tokens, pages), and
stays as it is: dashboards rest on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, Literal, NamedTuple

UNITS: Final = ("seconds", "bytes", "tokens", "pages")

Labels = tuple[str, ...]


class Definition(NamedTuple):
    """One metric: its name without the prefix and, of a counter, without `_total`."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    labels: Labels
    says: str
    prefix: str = "pdserve_pool_"

    @property
    def family_name(self) -> str:
        """Without `_total`, as the text form's parser has it."""
        return self.prefix + self.name

    @property
    def full_name(self) -> str:
        return self.family_name + ("_total" if self.kind == "counter" else "")

    @property
    def unit(self) -> str:
        """Empty for what is counted."""
        last = self.name.rpartition("_")[2]
        return last if last in UNITS else ""


def by_name(definitions: Iterable[Definition]) -> Mapping[str, Definition]:
    """By the name without prefix. Raises ValueError for a name that is there twice."""
    listed = list(definitions)
    found = {one.name: one for one in listed}
    if len(found) != len(listed):
        raise ValueError("two metrics have one name")
    return found
