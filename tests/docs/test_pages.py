"""README.md and docs/: current, linked, readable, and built strictly into a site that needs no network."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlsplit

import pytest

from docs.generate.markdown import with_block
from docs.generate.pages import stale
from docs.generate.product import ROOT
from tests.support.prose import headings, links, without_code, without_generated

README = ROOT / "README.md"
DOCS = ROOT / "docs"
BENCHMARKS = DOCS / "benchmarks.md"
REFERENCE = DOCS / "reference"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
WRITTEN = [page for page in PAGES if page.parent != REFERENCE]
MAX_README_LINES = 150
NAMED = re.compile(r"`((?:pdserve|launch|docs|tests)/[\w./-]*\w/?)`")
"""Paths of the layout that the modules move to. None is there yet: the check below says when one is."""
MEASURED = re.compile(r"\d ?×|\d ?[GM]B/s|\d tokens/s|\d requests/s|\b(?:p50|p99)\b")


def built(source: Path, to: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(to)],
        cwd=source,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


class Html(HTMLParser):
    """Anchors of a page, what its links lead to, and what a browser loads for it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.hrefs: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value for name, value in attrs if value}
        self.anchors |= {found[name] for name in ("id", "name") if name in found}
        if tag == "a" and "href" in found:
            self.hrefs.append(found["href"])
        if "src" in found:
            self.loaded.append(found["src"])
        if tag == "link" and found.get("rel") in ("stylesheet", "icon", "preconnect", "preload"):
            self.loaded.append(found["href"])


def test_the_generated_parts_are_current() -> None:
    assert [str(path.relative_to(ROOT)) for path in stale()] == [], "run launch/docs.sh --write"


def test_the_readme_is_short() -> None:
    assert len(README.read_text().splitlines()) <= MAX_README_LINES


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page: Path) -> None:
    lost = []
    for link in links(page.read_text()):
        target = page.parent / link.path if link.path else page
        if not target.exists() or (link.anchor and link.anchor not in set(headings(target.read_text()))):
            lost.append(link.target)
    assert lost == []


def test_files_that_pages_name_are_there() -> None:
    named = {name for page in WRITTEN for name in NAMED.findall(page.read_text())}
    assert len(named) > 20
    assert {name for name in named if not (ROOT / name).exists()} == set()


@pytest.mark.extended
def test_the_site_has_no_lost_links_and_loads_nothing_from_other_hosts(tmp_path: Path) -> None:
    site = tmp_path / "site"
    done = built(ROOT, site)
    assert done.returncode == 0, done.stderr
    pages = {path: Html(path.read_text()) for path in site.rglob("*.html") if path.name != "404.html"}
    assert len(pages) == len([page for page in PAGES if page.is_relative_to(DOCS)])
    lost = []
    for path, page in pages.items():
        for href in (href for href in page.hrefs if not urlsplit(href).scheme):
            name, anchor = urldefrag(unquote(href))
            target = (path.parent / name).resolve() if name else path
            if target not in pages:
                lost += [] if target.exists() else [(path.name, href)]
            elif anchor and anchor not in pages[target].anchors:
                lost.append((path.name, href))
    assert lost == []
    loaded = {found for page in pages.values() for found in page.loaded}
    assert loaded
    assert [found for found in sorted(loaded) if urlsplit(found).netloc] == []
    styles = "".join(path.read_text() for path in site.rglob("*.css"))
    assert re.findall(r"@import|url\(['\"]?https?:", styles) == []


@pytest.mark.parametrize(
    "page",
    [page for page in WRITTEN if page not in (BENCHMARKS, README)],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_measured_figures_stand_in_the_page_of_benchmarks_only(page: Path) -> None:
    assert MEASURED.findall(without_code(without_generated(page.read_text()))) == []


def test_a_block_is_replaced_between_its_markers_only() -> None:
    page = "a\n<!-- x:begin -->\nold\n<!-- x:end -->\nb\n"
    assert with_block(page, "x", "new\n") == page.replace("old", "new")
    with pytest.raises(ValueError, match="markers of y"):
        with_block(page, "y", "new")
