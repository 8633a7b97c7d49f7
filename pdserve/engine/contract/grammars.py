"""Bounds of schemas, regular expressions and EBNF, which SGLang compiles inside its scheduler's process.

A compiler that runs out of stack or memory there ends the scheduler for everybody, and one that does not
return holds up the requests behind it. Both come from nesting and from repetition: a bound `{1,1000}` is
written out a thousand times, and bounds multiply where they are nested. So each grammar has a cost, the
number of states that it is written out to, and what costs too much is refused. What is malformed is found
by the compiler itself, which answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pdserve.engine.contract.values import MAX_DEPTH, Rule, fields, kind, refused, size, text
from pdserve.errors import RequestError

MAX_EXPRESSION: Final = 16_384
MAX_EBNF: Final = 65_536
MAX_SCHEMA_BYTES: Final = 131_072
MAX_COST: Final = 50_000
_REPEATED: Final = ("minItems", "maxItems", "minProperties", "maxProperties")
_LENGTHS: Final = ("minLength", "maxLength")
_BOUNDS: Final = frozenset((*_REPEATED, *_LENGTHS))
_EXPRESSIONS: Final = ("pattern",)


def regex(name: str, value: Any) -> Any:
    """A regular expression within the bounds; empty: none."""
    _check_cost(name, text(MAX_EXPRESSION)(name, value), quotes="")
    return value


def ebnf(name: str, value: Any) -> Any:
    """A grammar within the bounds."""
    _check_cost(name, text(MAX_EBNF)(name, value), quotes="\"'")
    return value


def schema(name: str, value: Any) -> Any:
    """A JSON schema: an object, or true or false."""
    if not isinstance(value, dict | bool):
        raise refused(name, f"must be a JSON schema, an object, not {kind(value)}")
    if size(value, name) > MAX_SCHEMA_BYTES:
        raise refused(name, f"is larger than {MAX_SCHEMA_BYTES:,} bytes")
    if _schema_cost(name, value) > MAX_COST:
        raise refused(name, "repeats too much: lower its bounds of items and lengths, or nest them less")
    return value


def tool_schema(name: str, value: Any) -> Any:
    """The schema of a tool's parameters. Agents bound texts there by what they can take, which no grammar
    could be written out for: bounds that cost too much are left out.
    """
    try:
        return schema(name, value)
    except RequestError:
        return schema(name, _without_bounds(value))


def _without_bounds(value: Any, depth: int = 0) -> Any:
    if depth > MAX_DEPTH:
        return value
    if isinstance(value, list):
        return [_without_bounds(one, depth + 1) for one in value]
    if not isinstance(value, dict):
        return value
    return {
        member: _without_bounds(one, depth + 1)
        for member, one in value.items()
        if member not in _BOUNDS or isinstance(one, bool) or not isinstance(one, int | float)
    }


def json_schema(name: str, value: Any) -> Any:
    """The text of a schema, as `/generate` takes it; "$$ANY$$" is SGLang's word for any object."""
    found = text(MAX_SCHEMA_BYTES)(name, value)
    _check_nesting(name, found)
    return value


structural_tag: Final[Rule] = json_schema


def response_format(name: str, value: Any) -> Any:
    """OpenAI's `response_format`, or SGLang's structural tags."""
    if not isinstance(value, dict):
        raise refused(name, f'must be an object such as {{"type": "json_object"}}, not {kind(value)}')
    found = value.get("type")
    if found in ("text", "json_object"):
        return value
    if found == "structural_tag":
        if not isinstance(value.get("format"), dict) and not isinstance(value.get("structures"), list):
            raise refused(f"{name}.format", "must be an object")
        size(value, name)
        return value
    if found != "json_schema":
        raise refused(f"{name}.type", "must be text, json_object, json_schema or structural_tag")
    if isinstance(value.get("schema"), dict) and value.get("json_schema") is None:
        return fields({"schema": schema})(name, value)
    return fields({"json_schema": _named_schema}, needed=("json_schema",))(name, value)


def _named_schema(name: str, value: Any) -> Any:
    return fields({"schema": schema, "name": text(256)}, needed=("schema",))(name, value)


def _schema_cost(name: str, value: Any, depth: int = 0) -> float:
    """To how many parts the schema is written out, about."""
    if depth > MAX_DEPTH:
        raise refused(name, f"is nested more than {MAX_DEPTH} levels deep")
    if isinstance(value, list):
        return 1.0 + sum(_schema_cost(name, one, depth + 1) for one in value)
    if not isinstance(value, dict):
        return 1.0
    inner = 1.0 + sum(_schema_cost(name, one, depth + 1) for one in value.values())
    for member in _EXPRESSIONS:
        if isinstance(value.get(member), str):
            inner += cost(f"{name}.{member}", value[member], quotes="")
    return inner * _largest(name, value, _REPEATED) + _largest(name, value, _LENGTHS)


def _largest(name: str, value: Mapping[str, Any], members: tuple[str, ...]) -> float:
    found = 1.0
    for member in members:
        bound = value.get(member)
        if isinstance(bound, bool) or not isinstance(bound, int | float):
            continue
        if not 0 <= bound <= MAX_COST:
            raise refused(f"{name}.{member}", f"must be from 0 to {MAX_COST:,}")
        found = max(found, float(bound))
    return found


def _check_cost(name: str, expression: str, *, quotes: str) -> None:
    if cost(name, expression, quotes=quotes) > MAX_COST:
        raise refused(name, "repeats too much: lower its bounds, or nest them less")


def _check_nesting(name: str, found: str) -> None:
    depth = deepest = 0
    for character in found:
        depth += (character in "[{") - (character in "]}")
        deepest = max(deepest, depth)
    if deepest > MAX_DEPTH:
        raise refused(name, f"is nested more than {MAX_DEPTH} levels deep")


def cost(name: str, expression: str, *, quotes: str) -> float:
    """To how many states an expression is written out, about; a scan, so what is malformed costs something
    too. `quotes`: characters that begin and end literals. Raises RequestError for groups nested too deeply.
    """
    levels, last, at = [0.0], 0.0, 0
    while at < len(expression):
        character = expression[at]
        if character == "(":
            levels.append(0.0)
            last = 0.0
            if len(levels) > MAX_DEPTH:
                raise refused(name, f"is nested more than {MAX_DEPTH} levels deep")
        elif character == ")" and len(levels) > 1:
            last = max(1.0, levels.pop())
            levels[-1] += last
        elif character == "{" and (bound := _bound(expression, at)) is not None:
            times, at = bound
            levels[-1] += last * max(0.0, times - 1.0)
            last *= max(1.0, times)
        else:
            at = _literal_end(expression, at, quotes)
            last = 1.0
            levels[-1] += last
        at += 1
    return sum(levels)


def _bound(expression: str, at: int) -> tuple[float, int] | None:
    """The largest number of a `{m,n}` at this place, and where it ends; None: it is none."""
    end = expression.find("}", at, at + 24)
    words = [word.strip() for word in expression[at + 1 : end].split(",")] if end > 0 else []
    if not 1 <= len(words) <= 2 or not words[0].isdecimal() or not (words[-1].isdecimal() or words[-1] == ""):
        return None
    return max(float(word) for word in words if word), end


def _literal_end(expression: str, at: int, quotes: str) -> int:
    """The last place of the literal, class or escape that begins here."""
    character = expression[at]
    if character == "\\":
        return at + 1
    closing = "]" if character == "[" else character if character in quotes else ""
    if not closing:
        return at
    place = at + 1
    while place < len(expression) and expression[place] != closing:
        place += 2 if expression[place] == "\\" else 1
    return place
