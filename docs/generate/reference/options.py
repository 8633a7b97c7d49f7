"""docs/reference/options.md, from the configuration structs."""

from __future__ import annotations

from typing import Final, NamedTuple

from docs.generate.markdown import table
from docs.generate.product import CONFIGURED, Option, options_of

HEAD = """# Options

Every part of pdserve reads one table of a TOML file.
An unknown key is an error, and the message names the nearest known key.

- In a cluster file of `pdserve up` the tables have the names below.
- A process that you start by itself reads the same keys from the top level of its own file (`--config FILE`).
- Most options are also flags: `deadlines.head_s` is `--deadlines.head-s`. A flag wins over the file.
- Options of lists of tables (`tenants[].name`) and free tables (`ucx.options`) have no flag.
- A `secret` has no flag, because every user of a host sees the command lines of all. Logs do not show it.
  Each may be in a file: `admin_token_file = "PATH"`, or `--admin-token-file`, instead of `admin_token`.
- A `size` is a number of bytes, or text like `4GiB` and `2GB`.
- Repeat the flag of a list option to give several values.
- `required` means that there is no default. `none` means that the option is not set.
"""


SHARED_ROWS: Final = 2
"""From so many equal rows on, a table that others have too is listed once."""


class Table(NamedTuple):
    """One table of a section. `rows`: what a reader sees of each option, by its own name."""

    prefix: str
    anchor: str
    rows: dict[str, tuple[str, ...]]


def page() -> str:
    """The whole page."""
    parts, listed = [HEAD], list[Table]()
    for one in CONFIGURED:
        read_by = ", ".join(f"`{command}`" for command in one.commands)
        flags = "" if one.has_flags else " These options have no flags."
        parts.append(f"## {one.title} {{ #{one.anchor} }}\n\nRead by {read_by}.{flags}\n")
        by_table: dict[str, list[Option]] = {}
        for option in options_of(one.struct):
            by_table.setdefault(option.key.rpartition(".")[0], []).append(option)
        for prefix, found in by_table.items():
            anchor = f"{one.anchor}-{_slug(prefix)}"
            if prefix:
                parts.append(f"### `{prefix}` {{ #{anchor} }}\n")
            this = Table(prefix, anchor, {_leaf(option): _cells(option)[1:] for option in found})
            other = _equal(this, listed) if prefix else None
            if other is None:
                listed.append(this)
            else:
                missing = ", ".join(f"`{name}`" for name in other.rows if name not in this.rows)
                but = f", but {missing}" if missing else ""
                parts.append(f"As [`{other.prefix}`](#{other.anchor}){but}.\n")
                found = [option for option in found if _leaf(option) not in other.rows]
            if found:
                parts.append(table(("key", "type", "default", "what it does"), map(_cells, found)))
    return "\n".join(parts)


def _equal(this: Table, listed: list[Table]) -> Table | None:
    """A table with the same options, or all but a few of one of the two."""
    for other in listed:
        same = sum(this.rows.get(name) == row for name, row in other.rows.items())
        if other.prefix and same >= SHARED_ROWS and same == min(len(this.rows), len(other.rows)):
            return other
    return None


def _leaf(option: Option) -> str:
    return option.key.rpartition(".")[2]


def _slug(prefix: str) -> str:
    return prefix.replace("[]", "").replace(".", "-").replace("_", "-")


def _cells(option: Option) -> tuple[str, str, str, str]:
    return f"`{option.key}`", option.type_name, f"`{option.default}`", option.description
