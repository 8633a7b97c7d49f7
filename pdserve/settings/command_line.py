"""A command line made from a configuration struct: one flag for each option, its description as its help.

`config_command(RouterConfig, run, help="...")` gives a Typer app with `--config FILE` and a flag for every
option that a flag can hold: `port` is `--port`, `engine.page_size` is `--engine.page-size`, a bool has a
`--no-` twin, a list is given by repeating its flag; of a secret `token` there is only `--token-file PATH`.
Arrays of tables and free tables are for the file only. Flags win over the file.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Generic, TypeAlias, TypeVar

import msgspec
import typer

from pdserve.errors import ConfigError
from pdserve.settings.config_file import (
    NONE,
    REQUIRED,
    SUFFIX,
    Option,
    load_config,
    options,
    parse_value,
    read_toml,
)

T = TypeVar("T")
RESTARTED = "PDSERVE_RESTARTED"
"""Set in the environment of a process that a supervisor starts again."""


@dataclass(frozen=True)
class ConfigSource(Generic[T]):
    """Where a configuration came from, to read it again."""

    path: Path | None
    load: Callable[[], T]
    """The configuration as the file is now, the flags still over it. Raises ConfigError."""


def config_command(
    type_: type[T],
    run: Callable[..., int | None],
    *,
    help: str,
    extra_args_key: str | None = None,
    reloadable: bool = False,
    check: Callable[[T], None] | None = None,
) -> typer.Typer:
    """A Typer app of one command that builds a `type_` from `--config` and flags and calls `run` with it.

    `run` may return an exit status. With `extra_args_key` (dotted key of a `list[str]` option) the words
    after `--` are appended to that option's list in the file; without it, words after the flags are refused.
    `reloadable`: `run` gets a `ConfigSource` as its keyword argument `source`. `check`: what `--check` calls
    instead of `run`.
    """
    by_parameter = {
        _key(option).replace(".", "__"): option
        for option in options(type_)
        if option.kind != "file-only" and option.key != extra_args_key
    }

    def command(**given: Any) -> None:
        path: Path | None = given.pop("config")
        extra: list[str] = given.pop("extra", None) or []
        only_check = check is not None and given.pop("check")
        overrides = {
            _key(by_parameter[name]): _parsed(by_parameter[name], value) for name, value in given.items()
        }
        if extra_args_key is not None and extra:
            overrides[extra_args_key] = _from_file(path, extra_args_key) + extra
        source = ConfigSource(path, lambda: load_config(type_, path, overrides))
        if check is not None and only_check:
            check(source.load())
            return
        status = run(source.load(), source=source) if reloadable else run(source.load())
        if status:
            raise typer.Exit(status)

    parameters = [_config_parameter(), *(_parameter(name, option) for name, option in by_parameter.items())]
    if extra_args_key is not None:
        parameters.append(_extra_parameter())
    if check is not None:
        parameters.append(_check_parameter())
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(help=help)(command)
    return app


ExtraArgs: TypeAlias = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[-- SGLANG_FLAGS]", help="Flags passed to SGLang in every worker.", show_default=False
    ),
]
"""Of commands that start or describe several workers."""


def _config_parameter() -> inspect.Parameter:
    annotation = Annotated[
        Path | None, typer.Option("--config", metavar="FILE", help="TOML file; flags win over it.")
    ]
    return inspect.Parameter("config", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _extra_parameter() -> inspect.Parameter:
    annotation = Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[-- SGLANG_FLAGS]", help="Flags passed to SGLang unchanged.", show_default=False
        ),
    ]
    return inspect.Parameter("extra", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _check_parameter() -> inspect.Parameter:
    annotation = Annotated[
        bool, typer.Option("--check", help="Say what would start, or why it would not, and end.")
    ]
    return inspect.Parameter("check", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=annotation)


def _parameter(name: str, option: Option) -> inspect.Parameter:
    flag = "--" + _key(option).replace("_", "-")
    note = "[required]" if option.default == REQUIRED else f"[default: {option.default}]"
    help_text = f"{option.description} {'' if option.default == NONE else note}".strip()
    if option.kind == "switch":
        table, _, leaf = flag[2:].rpartition(".")
        off = f"--{table}.no-{leaf}" if table else f"--no-{leaf}"
        annotation: Any = Annotated[
            bool | None, typer.Option(f"{flag}/{off}", help=help_text, show_default=False)
        ]
    elif option.kind == "secret":
        text = f"File that holds it: {option.description}"
        annotation = Annotated[str | None, typer.Option(flag, metavar="PATH", help=text, show_default=False)]
    else:
        value_type: Any = list[str] | None if option.kind == "repeated" else str | None
        kinds = option.type_name.removeprefix("list of ").split(" or ")
        metavar = "|".join(kind.strip("`") if kind.startswith("`") else kind.upper() for kind in kinds)
        annotation = Annotated[
            value_type, typer.Option(flag, metavar=metavar, help=help_text, show_default=False)
        ]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _key(option: Option) -> str:
    """What its flag sets: of a secret the file that holds it."""
    return option.key + SUFFIX if option.kind == "secret" else option.key


def _parsed(option: Option, value: Any) -> Any:
    if value is None or isinstance(value, bool) or option.kind == "secret":
        return value
    try:
        return parse_value(option.annotation, value)
    except msgspec.ValidationError:
        flag = "--" + option.key.replace("_", "-")
        raise ConfigError(f"{flag}: must be {option.type_name}, found {value!r}") from None


def _from_file(path: Path | None, key: str) -> list[str]:
    """The list at `key` in the file as it stands there; its type is checked when the struct is built."""
    value: Any = {} if path is None else read_toml(path)
    for name in key.split("."):
        value = value.get(name, {}) if isinstance(value, dict) else {}
    return list(value) if isinstance(value, list) else []
