"""The commands that the documents show: where each stands, and which need what a test has not.

A command is every line of a code block that begins with `$ `, with the lines that continue it; in a block
without such lines, whose first word is a command, all lines are.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).parents[2]
SHELLS: Final = ("", "console", "bash", "sh")
FIRST_WORDS: Final = re.compile(r"(?:launch/\w+\.sh|pdserve|python|curl|helm|uv)\s")
NEEDS: Final = {
    "launch/setup.sh": "an installation of its own",
    ". .venv/bin/activate": "an installation of its own",
    "uv ": "the network: an environment of its own for another stack",
    "echo ": "the environment that stands before it",
    "launch/test.sh": "an hour: these are all tests",
    "launch/disagg.sh": "an installation; the demo is what it starts",
    "launch/agg.sh": "an installation of its own",
    "python -m pytest -m gpu": "a GPU",
    "pdserve agg --config agg.toml": "two hosts with GPUs",
    "pdserve agg --config worker.toml": "a worker that is not of the demo",
    "helm ": "Kubernetes",
    "pdserve pool drain": "a second pool node to take the pages",
    "pdserve pool status --all --watch": "somebody who ends it",
    "curl -H": "new weights on disk",
    "PDSERVE_POOL_TOKEN=... sglang serve": "a server of SGLang that is not of the demo",
    "cat router.toml": "the file that it shows",
    """curl HOST:8001/pages/erase ... -d '{"tenant": "acme", "session""": "a session of that tenant",
}
"""Beginnings of commands that are not run against the demo, and what they need."""


class Command(NamedTuple):
    """A command as it stands in `page`, from `line` on."""

    page: str
    line: int
    text: str

    @property
    def needs(self) -> str:
        """What it needs that the demo has not; empty: nothing."""
        return next((what for begin, what in NEEDS.items() if self.text.startswith(begin)), "")


def blocks(text: str) -> Iterator[tuple[int, str, list[str]]]:
    """The code blocks of a page: the number of their first line, their language, and their lines."""
    language, begin, lines = "", 0, list[str]()
    for number, line in enumerate(text.splitlines(), 1):
        if not line.startswith("```"):
            lines.append(line)
        elif begin:
            yield begin, language, lines
            begin = 0
        else:
            language, begin, lines = line[3:].strip(), number + 1, []


def commands(page: Path, root: Path = ROOT) -> Iterator[Command]:
    """Those of a page, in its order."""
    for first, language, lines in blocks(page.read_text(encoding="utf-8")):
        shown = any(line.startswith("$ ") for line in lines)
        if language not in SHELLS or not (shown or FIRST_WORDS.match(f"{lines[0]}\n")):
            continue
        at = 0
        while at < len(lines):
            begin, at = at, at + 1
            if shown and not lines[begin].startswith("$ "):
                continue
            while at < len(lines) and not is_whole("\n".join(lines[begin:at])):
                at += 1
            command = "\n".join(lines[begin:at]).removeprefix("$ ")
            yield Command(str(page.relative_to(root)), first + begin, command)


def is_whole(text: str) -> bool:
    """Whether a shell would run it: no open quote, and no backslash at its end."""
    try:
        shlex.split(text, comments=True)
    except ValueError:
        return False
    return not text.endswith("\\")


def all_commands(root: Path = ROOT) -> list[Command]:
    """Those of README.md, CONTRIBUTING.md and the documents."""
    pages = [root / "README.md", root / "CONTRIBUTING.md", *sorted((root / "docs").rglob("*.md"))]
    return [command for page in pages for command in commands(page, root)]
