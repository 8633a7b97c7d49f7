"""The names of SGLang that pdserve uses, and their check: `tests/engine/sglang/symbols.txt`, one a line.

    module
        Class.name(parameter, parameter) uses name, name

A line may say of its name which parameters or fields it takes (in brackets), which attributes its code `sets`
on `self`, which text constants it `fills in`, and which names it `uses`.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

TABLE = Path("tests/engine/sglang/symbols.txt")
_LINE = re.compile(
    r"(?P<name>[\w.]+)(\((?P<parameters>.*)\))?"
    r"( sets (?P<sets>.*)| fills in (?P<texts>.*)| uses (?P<uses>.*))?"
)


def misfits(table: str) -> Iterator[str]:
    """What of the table the installed SGLang lacks, one phrase each."""
    module = ""
    for line in filter(None, table.splitlines()):
        if not line.startswith(" "):
            module = line
        else:
            yield from _misfits_of(module, line.strip())


def _misfits_of(module: str, line: str) -> Iterator[str]:
    match = _LINE.fullmatch(line)
    assert match is not None, line
    said = {kind: set(words.split(", ")) for kind, words in match.groupdict().items() if words}
    name = f"{module}.{match['name']}"
    try:
        target: Any = importlib.import_module(module)
        for part in match["name"].split("."):
            target = getattr(target, part)
    except (ImportError, AttributeError):
        yield f"{name} is not there"
        return
    if unknown := said.get("parameters", set()) - _parameters(target):
        yield f"{name} takes no {_listed(unknown)}"
    if not said.keys() & {"sets", "texts", "uses"}:
        return
    found = _Code()
    found.visit(ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(target)))))
    for kind, has in (("sets", found.attributes), ("texts", found.texts), ("uses", found.names)):
        if lacking := said.get(kind, set()) - has:
            yield f"{name} has no {_listed(lacking)}"


def _parameters(target: Any) -> set[str]:
    return set(inspect.signature(target).parameters) if callable(target) else set()


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


class _Code(ast.NodeVisitor):
    """The names that some code uses, by kind."""

    def __init__(self) -> None:
        self.attributes: set[str] = set()
        self.texts: set[str] = set()
        self.names: set[str] = set()

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.names.add(node.attr)
        if isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name) and node.value.id == "self":
            self.attributes.add(node.attr)
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if isinstance(node.target, ast.Name):  # a field, in the body of a class
            self.attributes.add(node.target.id)
        self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        self.names.add(node.id)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str):
            self.texts.add(node.value)
