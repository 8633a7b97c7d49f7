"""Rules for JSON values. A rule takes the name of a field and its value, and returns the value that SGLang
gets.

Messages name the field and say what was expected; of the client's value they tell the type alone, because
errors are logged and a value may be a prompt. `DROP` as a result takes the member out, which means its
default.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, TypeAlias

from pdserve.errors import RequestError

Rule: TypeAlias = Callable[[str, Any], Any]
DROP: Final = object()

MAX_DEPTH: Final = 64
"""Of nested lists and objects in values that are passed on as they are; Python's own limit is a thousand
frames.
"""


def refused(name: str, why: str) -> RequestError:
    """A 400 that names the field."""
    return RequestError(400, f"{name} {why}", param=name, code="invalid_value")


def kind(value: Any) -> str:
    """The JSON type of a value, for people."""
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case str():
            return "a string"
        case list():
            return "a list"
    return "an object"


def as_object(name: str, value: Any) -> dict[str, Any]:
    """The value, which must be an object."""
    if not isinstance(value, dict):
        raise refused(name, f"must be an object, not {kind(value)}")
    return value


def number(least: float, most: float) -> Rule:
    """A finite number in [least, most]."""

    def rule(name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise refused(name, f"must be a number, not {kind(value)}")
        if not least <= value <= most:  # so is no NaN
            raise refused(name, f"must be from {least:g} to {most:g}")
        return value

    return rule


def integer(least: int, most: int) -> Rule:
    """A whole number in [least, most]; 4.0 is 4."""

    def rule(name: str, value: Any) -> int:
        if isinstance(value, float) and math.isfinite(value) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            what = "a fraction" if isinstance(value, float) else kind(value)
            raise refused(name, f"must be a whole number, not {what}")
        if not least <= value <= most:
            raise refused(name, f"must be from {least} to {most}")
        return value

    return rule


def boolean(name: str, value: Any) -> bool:
    """true or false."""
    if not isinstance(value, bool):
        raise refused(name, f"must be true or false, not {kind(value)}")
    return value


def text(most: int) -> Rule:
    """A string of at most `most` characters."""

    def rule(name: str, value: Any) -> str:
        if not isinstance(value, str):
            raise refused(name, f"must be a string, not {kind(value)}")
        if len(value) > most:
            raise refused(name, f"has {len(value):,} characters; at most {most:,} are allowed")
        return value

    return rule


def choice(*values: str) -> Rule:
    """One of these strings."""

    def rule(name: str, value: Any) -> str:
        if not isinstance(value, str) or value not in values:
            raise refused(name, f"must be one of {', '.join(values)}")
        return value

    return rule


def one_of(*rules: Rule, what: str) -> Rule:
    """What the first rule that does not refuse makes of it. `what`: all of them in words."""

    def rule(name: str, value: Any) -> Any:
        for each in rules:
            try:
                return each(name, value)
            except RequestError:
                continue
        raise refused(name, f"must be {what}, not {kind(value)}" if what else "is not as expected")

    return rule


def list_of(each: Rule, most: int, least: int = 0) -> Rule:
    """A list of `least` to `most` values, each by the rule; a member that it drops is left out."""

    def rule(name: str, value: Any) -> list[Any]:
        if not isinstance(value, list):
            raise refused(name, f"must be a list, not {kind(value)}")
        if not least <= len(value) <= most:
            raise refused(name, f"has {len(value):,} members; {least:,} to {most:,} are allowed")
        made = [each(f"{name}[{i}]", one) for i, one in enumerate(value)]
        if all(map(operator.is_, made, value)):
            return value
        return [one for one in made if one is not DROP]

    return rule


def anything(most_bytes: int) -> Rule:
    """Any value whose text has about `most_bytes` at most, nested at most MAX_DEPTH deep."""

    def rule(name: str, value: Any) -> Any:
        if size(value, name) > most_bytes:
            raise refused(name, f"is larger than {most_bytes:,} bytes")
        return value

    return rule


def an_object(most_bytes: int) -> Rule:
    """An object within the bounds of `anything`."""
    bounded = anything(most_bytes)

    def rule(name: str, value: Any) -> Any:
        return bounded(name, as_object(name, value))

    return rule


def fields(known: Mapping[str, Rule], *, needed: Collection[str] = (), is_closed: bool = False) -> Rule:
    """An object whose members follow these rules. null is as if the member were not there. Members without
    a rule are passed on, or refused where the object `is_closed`.
    """

    def rule(name: str, value: Any) -> dict[str, Any]:
        return judged(f"{name}.", as_object(name, value), known, needed=needed, is_closed=is_closed)

    return rule


def judged(
    prefix: str,
    value: dict[str, Any],
    known: Mapping[str, Rule],
    *,
    needed: Collection[str] = (),
    is_closed: bool = False,
) -> dict[str, Any]:
    """`value` by the rules of its members; the same object where nothing changes. `prefix` of their names."""
    changed: dict[str, Any] = {}
    for member, found in value.items():
        made: Any = found
        if (each := known.get(member)) is not None:
            made = DROP if found is None else each(prefix + member, found)
        elif is_closed:
            raise refused(f"{prefix}{member[:100]}", "is not a known field")
        if made is not found:
            changed[member] = made
    for member in needed:
        if value.get(member) is None:
            raise refused(prefix + member, "is missing")
    if not changed:
        return value
    merged = {**value, **changed}
    return {member: made for member, made in merged.items() if made is not DROP}


def size(value: Any, name: str, depth: int = 0) -> int:
    """About the bytes of its text. Raises RequestError for what is nested too deeply."""
    if depth > MAX_DEPTH:
        raise refused(name, f"is nested more than {MAX_DEPTH} levels deep")
    if isinstance(value, str):
        return len(value) + 2
    if isinstance(value, list):
        return 2 + sum(size(one, name, depth + 1) + 1 for one in value)
    if isinstance(value, dict):
        return 2 + sum(len(member) + 4 + size(one, name, depth + 1) for member, one in value.items())
    return 8
