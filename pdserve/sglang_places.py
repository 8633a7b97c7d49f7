"""A place in SGLang that pdserve leans on: a name, the parameters or fields it counts on, and its check.

SGLang promises none of these names. Each module that uses some declares them in its `PLACES`. The start-up
self-check (`engine/sglang/selfcheck.py`) reads them all. Imports no SGLang by itself.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Place:
    """An attribute of a module of SGLang, dotted where it lies in a class, and what is counted on of it."""

    module: str
    attribute: str
    parameters: tuple[str, ...] = ()  # among its parameters, or the fields of a record
    attributes: tuple[str, ...] = ()  # its code sets them on `self`
    texts: tuple[str, ...] = ()  # string constants in its code: keys of a dictionary that it fills
    calls: tuple[str, ...] = ()  # its code mentions them, so it may still call them

    @property
    def name(self) -> str:
        return f"{self.module}.{self.attribute}"

    def find(self) -> Any:
        """The object. Raises ImportError or AttributeError."""
        target: Any = importlib.import_module(self.module)
        for part in self.attribute.split("."):
            target = getattr(target, part)
        return target


_LINE = re.compile(
    r"(?P<attribute>[\w.]+)(\((?P<parameters>.*)\))?"
    r"( sets (?P<attributes>.*)| fills in (?P<texts>.*)| uses (?P<calls>.*))?"
)


def places(module: str, *lines: str) -> tuple[Place, ...]:
    """Places of one module, one a line: `name`, `Class.name`, `name(parameter, parameter)`; after it perhaps
    `sets attribute`, `fills in text` or `uses name`, each with more names behind commas.
    """
    found = []
    for line in lines:
        match = _LINE.fullmatch(line)
        assert match is not None, line
        names = {kind: tuple(said.split(", ")) for kind, said in match.groupdict().items() if said}
        [attribute] = names.pop("attribute")
        found.append(Place(module, attribute, **names))
    return tuple(found)


def missing_places(places: Iterable[Place]) -> Iterator[str]:
    """What of `places` the installed SGLang lacks, one phrase each."""
    for place in places:
        try:
            target = place.find()
        except ImportError as error:
            yield f"{place.name}: {error}"
        except AttributeError:
            yield f"{place.name} is not there"
        else:
            yield from _misfits(place, target)


def _misfits(place: Place, target: Any) -> Iterator[str]:
    if place.parameters:
        unknown = set(place.parameters) - set(inspect.signature(target).parameters)
        if unknown:
            yield f"{place.name} takes no {_listed(unknown)}"
    if not (place.attributes or place.texts or place.calls):
        return
    found = _Code()
    found.visit(ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(target)))))
    for wanted, has, verb in (
        (place.attributes, found.attributes, "sets no"),
        (place.texts, found.texts, "fills in no"),
        (place.calls, found.names, "no longer uses"),
    ):
        if lacking := set(wanted) - has:
            yield f"{place.name} {verb} {_listed(lacking)}"


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
