"""Markdown as the checks of the documents see it: prose, headings and links."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

_FENCE = re.compile(r"^\s*```.*?^\s*```\s*$", re.M | re.S)
_GENERATED = re.compile(r"<!-- (\S+):begin -->\n.*?<!-- \1:end -->", re.S)
_LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#{1,6} (.*?)(?: *\{ *#([\w-]+) *\})?$", re.M)


class Link(NamedTuple):
    """A link of a page: the file, relative to it, and the anchor; either may be empty."""

    target: str
    path: str
    anchor: str


def without_code(text: str) -> str:
    """Without code blocks."""
    return _FENCE.sub("", text)


def without_generated(text: str) -> str:
    """Without the blocks between markers."""
    return _GENERATED.sub("", text)


def headings(text: str) -> Iterator[str]:
    """The anchors of a page's headings, as MkDocs and GitHub make them."""
    for match in _HEADING.finditer(without_code(text)):
        words = _LINK.sub(r"\1", match[1]).replace("`", "").lower()
        yield match[2] or re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", words).strip())


def links(text: str) -> Iterator[Link]:
    """The links that stay in this repository."""
    for match in _LINK.finditer(without_code(text)):
        target = match[2]
        if "://" not in target:
            path, _, anchor = target.partition("#")
            yield Link(target, path, anchor)
