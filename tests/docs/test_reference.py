"""docs/reference says everything that the product has."""

from __future__ import annotations

import re
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
        elif keys.isdisjoint({key := parameter.name.replace("__", "."), key.removesuffix("_file")}):
            assert all(f"`{flag}" in section for flag in parameter.opts), parameter.name


def test_every_option_is_listed_in_its_table_or_in_one_that_this_names() -> None:
    whole = page("options")
    for one in CONFIGURED:
        _, _, section = whole.partition(f"## {one.title} {{")
        section = section.partition("\n## ")[0]
        for option in options_of(one.struct):
            if f"| `{option.key}` |" in section:
                continue
            prefix, _, leaf = option.key.rpartition(".")
            _, _, own = section.partition(f"### `{prefix}` {{")
            named = re.match(r".*\n\nAs \[`(.+)`\]\(#(.+?)\)", own)
            assert named, option.key
            _, _, other = whole.partition(f"{{ #{named[2]} }}")
            row = f"| `{named[1]}.{leaf}` | {option.type_name} | `{option.default}` | {option.description} |"
            assert row in other.partition("\n### ")[0].replace("\\|", "|")


def test_every_metric_is_listed() -> None:
    assert [one.full_name for one in LISTED if f"| `{one.full_name}` |" not in page("metrics")] == []
