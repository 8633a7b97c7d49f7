"""docs/reference/cli.md, from the commands that Typer makes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from docs.generate.markdown import table
from docs.generate.product import CONFIGURED, commands

HEAD = """# Command line

`pdserve COMMAND --help` shows the same. The exit status is 0 for success, 2 for a configuration error, and
1 for every other error. An error is one line on stderr.
"""
OWN = ("config", "extra", "check")
"""Parameters of a configured command that are not options of its configuration."""
PAGE_OF = {command: one for one in CONFIGURED if one.has_flags for command in one.commands}


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for words, command in commands():
        parts += _section(words, command)
    return "\n".join(parts)


def _section(words: str, command: Any) -> Iterator[str]:
    yield f"## `{words}` {{ #{_anchor(words)} }}\n\n{_prose(command.help or '')}\n"
    inner: dict[str, Any] = getattr(command, "commands", {})
    if inner:
        rows = [
            (f"[`{words} {name}`](#{_anchor(f'{words} {name}')})", _first_sentence(sub.help or ""))
            for name, sub in inner.items()
        ]
        yield table(("command", "what it does"), rows)
        for name, sub in inner.items():
            yield from _section(f"{words} {name}", sub)
        return
    configured = PAGE_OF.get(words)
    parameters = [one for one in command.params if configured is None or one.name in OWN]
    if parameters:
        yield table(("argument or flag", "default", "what it does"), map(_cells, parameters))
    if configured is not None:
        link = f"options.md#{configured.anchor}"
        yield f"Every option [of its configuration]({link}) is a flag too, except lists of tables.\n"


def _cells(parameter: Any) -> tuple[str, str, str]:
    if parameter.param_type_name == "argument":
        name = parameter.metavar or parameter.name.upper()
        names = f"`{name}`"
    else:
        value = "" if parameter.is_flag else f" {parameter.metavar or parameter.name.upper()}"
        flags = [*parameter.opts, *parameter.secondary_opts]
        names = ", ".join(f"`{flag}{value}`" for flag in flags)
    said = parameter.help or ""
    if parameter.envvar:
        said = f"{said} Also from `{parameter.envvar}`."
    return names, _default(parameter), said.strip()


def _default(parameter: Any) -> str:
    if parameter.required:
        return "required"
    value = parameter.default
    if value is None or value == "" or callable(value) or "Sentinel" in type(value).__name__:
        return ""
    if isinstance(value, bool):
        return "on" if value else ""
    if isinstance(value, list | tuple):
        return ", ".join(f"`{one}`" for one in value)
    return f"`{value}`"


def _prose(text: str) -> str:
    return text.replace("\f", "").strip()


def _first_sentence(text: str) -> str:
    return _prose(text).split("\n\n")[0]


def _anchor(words: str) -> str:
    return words.replace(" ", "-")
