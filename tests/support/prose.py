"""Markdown as the checks of the documents see it: prose, sentences, headings and links."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

_FENCE = re.compile(r"^\s*```.*?^\s*```\s*$", re.M | re.S)
_GENERATED = re.compile(r"<!-- (\S+):begin -->\n.*?<!-- \1:end -->", re.S)
_CODE = re.compile(r"`[^`]*`")
_LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#{1,6} (.*?)(?: *\{ *#([\w-]+) *\})?$", re.M)
_SENTENCE_END = re.compile(r"(?<=[.!?])[)*\"”]*\s+|;\s")
_LIST_ITEM = re.compile(r"^\s*(?:[-*]|\d+\.)\s")


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


def sentences(text: str) -> Iterator[str]:
    """Every sentence of paragraphs, list items and table cells. A `code` span is one word; a semicolon ends a
    sentence.
    """
    blocks: list[list[str]] = [[]]
    for line in without_code(without_generated(text)).splitlines():
        if line.startswith("|"):
            blocks += [[cell] for cell in line.strip("|").split(" | ")]
            blocks.append([])
        elif not line.strip() or line.startswith(("#", "!!!", "<!--")):
            blocks.append([])
        elif _LIST_ITEM.match(line):
            blocks.append([_LIST_ITEM.sub("", line)])
        else:
            blocks[-1].append(line)
    for block in blocks:
        plain = _CODE.sub("code", _LINK.sub(r"\1", " ".join(block)))
        yield from (found.strip() for found in _SENTENCE_END.split(plain) if found.strip())
