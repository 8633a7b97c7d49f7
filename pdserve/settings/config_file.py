"""Configuration: a TOML file with command-line flags over it becomes one frozen msgspec struct.

Every part of pdserve declares its own struct (`pdserve.router.config.router.RouterConfig`, ...), with
`frozen=True, kw_only=True, forbid_unknown_fields=True`, and describes each field by a text below it. This
module turns file and flags into such a struct, says in one line what is wrong where they do not fit, and
lists a struct's options for `--help` and for the documents.

A key is written with its tables, as in `engine.page_size`; an entry of an array of tables as in
`pool.nodes[0].address`. Beside each secret `NAME` the file may name one that holds it, as `NAME_file`. A
`Size` may be written like `4GiB`.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import re
import sys
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping
from enum import Enum
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
import tomli_w

from pdserve.errors import ConfigError
from pdserve.security.tokens import Secret, SecretFile, decode_secret
from pdserve.sizes import parse_bytes

T = TypeVar("T")

Kind = Literal["scalar", "switch", "repeated", "secret", "file-only"]
"""How an option is given as a flag: `--x V`, `--x/--no-x`, `--x V --x W`, `--x-file PATH`, or not at all."""
SUFFIX = "_file"
"""Ends the key of the file that holds a secret."""

REQUIRED = "required"
NONE = "none"
"""What `Option.default` says of an option without a default, and of one whose default is None."""

NO_FILE = "configuration"
"""What errors name where there is no file."""


class Option(msgspec.Struct, frozen=True):
    """One leaf of a configuration struct."""

    key: str
    """Dotted key; `nodes[].address` is the key of each entry of an array of tables."""
    annotation: Any
    """The field's type as declared, `Annotated` and all."""
    kind: Kind
    type_name: str
    """The type in words, for people."""
    default: str
    """The default as TOML would write it, `none`, or `required`."""
    description: str


def load_config(type_: type[T], path: Path | None, overrides: Mapping[str, Any]) -> T:
    """Read `path` (TOML), lay `overrides` over it and build a `type_`.

    `overrides` maps dotted keys to values; None means "not given". Raises ConfigError with one line that
    names the file, the key, what was expected and what was found.
    """
    data = {} if path is None else read_toml(path)
    given = {key: value for key, value in overrides.items() if value is not None}
    for key, value in given.items():
        _put(data, key, value)
    return build_config(type_, data, source=NO_FILE if path is None else str(path), flags=given)


def build_config(
    type_: type[T],
    data: Mapping[str, Any],
    *,
    source: str,
    flags: Mapping[str, Any] = types.MappingProxyType({}),
) -> T:
    """Build a `type_` from tables already read; `source` and `flags` (dotted keys) only serve errors."""
    data = _with_words_read(type_, data, source)
    unknown = list(_unknown_keys(type_, data))
    if unknown:
        lines = [
            f"unknown key '{key}'{f' (did you mean {near!r}?)' if near else ''}" for key, near in unknown
        ]
        raise ConfigError(f"{_origin(unknown[0][0], source, flags)}: {'; '.join(lines)}")
    try:
        return msgspec.convert(data, type_, dec_hook=_decode_custom)
    except msgspec.ValidationError as error:
        raise ConfigError(_explain(type_, str(error), data, source, flags)) from None


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file. Raises ConfigError: missing, unreadable, or a syntax error with its line."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such configuration file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        what = str(error).replace("at end of document", f"at line {len(text.splitlines())}, end of file")
        raise ConfigError(f"{path}: not valid TOML: {what}") from None


def to_toml(tables: Mapping[str, Any]) -> str:
    """TOML text that `read_toml` reads back as `tables`. Paths become strings, None is left out.

    Raises TypeError for a value that TOML has no form for.
    """
    return tomli_w.dumps(_plain(tables))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return str(value) if isinstance(value, Path) else value


def parse_value(annotation: Any, text: str | list[str]) -> Any:
    """A flag's text as a value of the option's type; a size stays text, as in a file. Raises
    msgspec.ValidationError.
    """
    if _is_size(annotation):
        return text
    return msgspec.convert(text, annotation, strict=False, dec_hook=_decode_custom)


def options(type_: type[Any], prefix: str = "", *, file_only: bool = False) -> Iterator[Option]:
    """The leaves of a configuration struct in order of declaration, tables flattened to dotted keys."""
    hints = typing.get_type_hints(type_, include_extras=True)
    for field in msgspec.structs.fields(type_):
        annotation, key = hints[field.name], prefix + field.encode_name
        inner = _strip(annotation)
        struct, is_array = _struct_within(inner)
        if struct is not None:
            yield from options(
                struct, f"{key}[]." if is_array else f"{key}.", file_only=file_only or is_array
            )
            continue
        kind = "file-only" if file_only else _kind(inner)
        type_name = _type_name(inner)
        if _is_size(annotation):
            type_name = " or ".join(("size", *(f"`{word}`" for word in _words(annotation))))
        yield Option(key, annotation, kind, type_name, _default_text(field), _description(type_, field.name))


def _description(type_: type[Any], field: str) -> str:
    """The text below a field, which may be inherited. Empty: there is none, or no source to find it in."""
    found = (_texts(class_.__module__).get((class_.__qualname__, field)) for class_ in type_.__mro__)
    return next(filter(None, found), "")


@cache
def _texts(module: str) -> dict[tuple[str, str], str]:
    """The texts below the fields of a module's classes, by class and field."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (OSError, TypeError):
        return {}
    texts: dict[tuple[str, str], str] = {}
    for class_ in [node for node in tree.body if isinstance(node, ast.ClassDef)]:
        for field, below in pairwise(class_.body):
            match field, below:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    texts[class_.name, name] = " ".join(text.split())
    return texts


# --- laying flags over the file


def _put(data: dict[str, Any], key: str, value: Any) -> None:
    *tables, leaf = key.split(".")
    for name in tables:
        table = data.setdefault(name, {})
        if not isinstance(table, dict):
            raise ConfigError(f"'{name}' must be a table for '{key}' to be set in it, found {_found(table)}")
        data = table
    data[leaf] = value


# --- what a file says in words: sizes, and which file holds a secret


def _with_words_read(annotation: Any, data: Any, source: str, prefix: str = "") -> Any:
    """The tables with bytes for each size, and a SecretFile for each secret that they name a file of. Raises
    ConfigError.
    """
    struct, is_array = _struct_within(_strip(annotation))
    if struct is None:
        return data
    if is_array:
        if not isinstance(data, list | tuple):
            return data
        name = prefix.removesuffix(".")
        return [_with_words_read(struct, entry, source, f"{name}[{i}].") for i, entry in enumerate(data)]
    if not isinstance(data, Mapping):
        return data
    found = dict(data)
    for name, field in _fields(struct).items():
        if name in found:
            found[name] = _with_words_read(field, found[name], source, f"{prefix}{name}.")
        if _is_size(field) and isinstance(found.get(name), str) and found[name] not in _words(field):
            try:
                found[name] = parse_bytes(found[name])
            except ValueError as error:
                raise ConfigError(f"{source}: '{prefix}{name}': {error}") from None
        key = name + SUFFIX
        if _strip(field) is Secret and key in found:
            path = found.pop(key)
            if not isinstance(path, str):
                raise ConfigError(f"{source}: '{prefix}{key}' must be a path, found {_found(path)}")
            if found.get(name):
                raise ConfigError(f"{source}: {prefix}{name} and {prefix}{key} are both set: keep one")
            found[name] = SecretFile(Path(path).expanduser())
    return found


def _fields(struct: Any) -> dict[str, Any]:
    """The annotations of a struct's fields, by their names in a file."""
    hints = typing.get_type_hints(struct, include_extras=True)
    return {field.encode_name: hints[field.name] for field in msgspec.structs.fields(struct)}


# --- saying what is wrong


def _unknown_keys(annotation: Any, data: Any, prefix: str = "") -> Iterator[tuple[str, str | None]]:
    """Dotted keys that no field takes, each with the nearest valid one."""
    struct, is_array = _struct_within(_strip(annotation))
    if struct is None:
        return
    if is_array:
        if isinstance(data, list):
            for i, entry in enumerate(data):
                yield from _unknown_keys(struct, entry, f"{prefix.removesuffix('.')}[{i}].")
        return
    if not isinstance(data, Mapping):
        return
    fields = _fields(struct)
    files = (f"{name}{SUFFIX}" for name, field in fields.items() if _strip(field) is Secret)
    names = [*fields, *files]
    for name, value in data.items():
        if name in fields:
            yield from _unknown_keys(fields[name], value, f"{prefix}{name}.")
        elif name != struct.__struct_config__.tag_field:
            near = difflib.get_close_matches(name, names, n=1)
            yield prefix + name, prefix + near[0] if near else None


_AT = re.compile(r"^(?P<what>.*?)(?: - at `\$\.?(?P<where>[^`]*)`)?$", re.DOTALL)
_EXPECTED = re.compile(r"^Expected (?P<expected>`.+?`.*?)(?:, got `.+`)?$")
_MISSING = re.compile(r"^Object missing required field `(?P<name>.+)`$")


def _explain(
    type_: type[Any], message: str, data: Mapping[str, Any], source: str, flags: Mapping[str, Any]
) -> str:
    """msgspec's message ("Expected `int`, got `str` - at `$.router.port`") as one line for a person."""
    match = _AT.match(message)
    what, where = (match["what"], match["where"] or "") if match else (message, "")
    origin = _origin(where, source, flags)
    if missing := _MISSING.match(what):
        key = _required_leaf(type_, f"{where}.{missing['name']}" if where else missing["name"])
        flag = f"; its flag is {_flag(key)}" if source == NO_FILE else ""
        return f"{origin}: missing required key '{key}'{flag}"
    at, value = f"'{where}'" if where else "configuration", _get(data, where)
    if _is_secret(type_, where):
        return f"{origin}: {at} must be a string"
    if expected := _EXPECTED.match(what):
        wanted = expected["expected"].replace("`", "").replace("object", "table").replace("array", "list")
        return f"{origin}: {at} must be {wanted}, found {_found(value)}"
    if what.startswith("Invalid enum value"):
        return f"{origin}: {at} must be {_choices(type_, where)}, found {_found(value)}"
    return f"{origin}: {at}: {what}"


def _required_leaf(type_: type[Any], key: str) -> str:
    """The first key without a default in the table `key`, or `key` itself."""
    pattern = _without_numbers(key)
    below = (o.key for o in options(type_) if o.default == REQUIRED and o.key.startswith(f"{pattern}."))
    return key + next(below, pattern).removeprefix(pattern)


def _choices(type_: type[Any], where: str) -> str:
    key = _without_numbers(where)
    names = [option.type_name for option in options(type_) if option.key in (key, key.removesuffix("[]"))]
    return names[0].removeprefix("list of ").replace("`", "'") if names else "a known name"


def _is_secret(type_: type[Any], where: str) -> bool:
    pattern = _without_numbers(where)
    return any(option.key == pattern and option.type_name == "secret" for option in options(type_))


def _without_numbers(key: str) -> str:
    return re.sub(r"\[[^\]]*\]", "[]", key)


def _flag(key: str) -> str:
    return f"--{key.replace('_', '-')}"


def _origin(key: str, source: str, flags: Mapping[str, Any]) -> str:
    return _flag(key) if key in flags else source


def _get(data: Any, key: str) -> Any:
    """The value at a dotted key of msgspec's, or the innermost one that can be reached."""
    for step in re.findall(r"[^.\[\]]+", key):
        if isinstance(data, Mapping) and step in data:
            data = data[step]
        elif isinstance(data, list) and step.isdigit() and int(step) < len(data):
            data = data[int(step)]
        else:
            break
    return data


def _found(value: Any) -> str:
    if isinstance(value, Mapping):
        return "a table"
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"


# --- reading types


def _decode_custom(type_: type[Any], value: Any) -> Any:
    if type_ is Path and isinstance(value, str):
        return Path(value).expanduser()
    if type_ is Secret:
        return decode_secret(type_, value)
    if isinstance(value, type_):
        return value
    raise ValueError(f"Expected `{type_.__name__.lower()}`, got `{type(value).__name__}`")


def _strip(annotation: Any) -> Any:
    """An annotation without `Annotated`."""
    is_annotated = typing.get_origin(annotation) is typing.Annotated
    return typing.get_args(annotation)[0] if is_annotated else annotation


def _is_size(annotation: Any) -> bool:
    """Whether it is a `Size`, described or not."""
    found = typing.get_args(annotation) if typing.get_origin(annotation) is typing.Annotated else ()
    return any(isinstance(meta, msgspec.Meta) and (meta.extra or {}).get("size") for meta in found)


def _words(annotation: Any) -> list[str]:
    """The words that may stand for a value."""
    members = _members(_strip(annotation))
    return [word for one in members if typing.get_origin(one) is Literal for word in typing.get_args(one)]


def _members(annotation: Any) -> tuple[Any, ...]:
    """The members of a union, None left out; a type that is no union is its own only member."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return tuple(_strip(a) for a in typing.get_args(annotation) if a is not type(None))
    return (annotation,)


def _struct_within(annotation: Any) -> tuple[Any, bool]:
    """(struct, is it an array of tables) for a struct, an optional one or a list of them."""
    members = _members(annotation)
    if len(members) != 1:
        return None, False
    if typing.get_origin(members[0]) in (list, tuple):
        entry = _strip(typing.get_args(members[0])[0])
        return (entry, True) if _is_struct(entry) else (None, False)
    return (members[0], False) if _is_struct(members[0]) else (None, False)


def _is_struct(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, msgspec.Struct)


def _kind(annotation: Any) -> Kind:
    members = _members(annotation)
    origins = {typing.get_origin(member) or member for member in members}
    if origins == {bool}:
        return "switch"
    if origins == {Secret}:
        return "secret"
    if origins & {dict, Mapping}:
        return "file-only"
    return "repeated" if origins & {list, tuple, set, frozenset} else "scalar"


_NAMES = {"str": "string", "Secret": "secret", "Path": "path"}


def _type_name(annotation: Any) -> str:
    names = []
    for member in _members(annotation):
        origin, args = typing.get_origin(member), typing.get_args(member)
        if origin is Literal:
            names.append(" or ".join(f"`{arg}`" for arg in args))
        elif origin in (list, tuple, set, frozenset):
            names.append(f"list of {_type_name(_strip(args[0]))}")
        elif origin is dict:
            names.append(f"table of {_type_name(_strip(args[1]))}")
        elif isinstance(member, type) and issubclass(member, Enum):
            names.append(" or ".join(f"`{entry.value}`" for entry in member))
        else:
            names.append(_NAMES.get(member.__name__, member.__name__))
    return " or ".join(names)


def _default_text(field: msgspec.structs.FieldInfo) -> str:
    if field.required:
        return REQUIRED
    factory = field.default_factory
    value = field.default if factory is msgspec.NODEFAULT else factory()
    if value is None:
        return NONE
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple | set | frozenset):
        return "[" + ", ".join(str(entry) for entry in value) + "]"
    return str(value) if value != "" else '""'
