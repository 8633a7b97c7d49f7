"""docs/reference says everything that the product has."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from docs.generate.product import CONFIGURED, LISTED, ROOT, commands, options_of

REFERENCE = ROOT / "docs" / "reference"
OF_CONFIGURATION = {command: one for one in CONFIGURED if one.has_flags for command in one.commands}


def page(name: str) -> str:
    return (REFERENCE / f"{name}.md").read_text()


def each(words: str, command: Any) -> Iterator[tuple[str, Any]]:
    yield words, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from each(f"{words} {name}", inner)


ALL = dict(found for words, command in commands() for found in each(words, command))


@pytest.mark.parametrize("words", ALL)
def test_every_flag_of_every_command_is_listed(words: str) -> None:
    _, _, section = page("cli").partition(f"## `{words}` {{")
    section = section.partition("\n## ")[0]
    assert section
    if hasattr(ALL[words], "commands"):  # the flags are those of the commands in it
        return
    keys = (
        {option.key for option in options_of(OF_CONFIGURATION[words].struct)}
        if words in OF_CONFIGURATION
        else set()
    )
    for parameter in ALL[words].params:
        if parameter.param_type_name == "argument":
            assert f"`{parameter.metavar or parameter.name.upper()}`".replace("|", "\\|") in section
        elif parameter.name.replace("__", ".") not in keys:
            assert all(f"`{flag}" in section for flag in parameter.opts), parameter.name


def test_every_option_is_listed() -> None:
    for one in CONFIGURED:
        _, _, section = page("options").partition(f"## {one.title} {{")
        section = section.partition("\n## ")[0]
        assert [o.key for o in options_of(one.struct) if f"| `{o.key}` |" not in section] == []


def test_every_metric_is_listed() -> None:
    assert [one.full_name for one in LISTED if f"| `{one.full_name}` |" not in page("metrics")] == []
