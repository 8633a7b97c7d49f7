"""docs/reference/options.md, from the configuration structs."""

from __future__ import annotations

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
- Repeat the flag of a list option to give several values.
- `required` means that there is no default. `none` means that the option is not set.
"""


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for one in CONFIGURED:
        read_by = ", ".join(f"`{command}`" for command in one.commands)
        flags = "" if one.has_flags else " These options have no flags."
        parts.append(f"## {one.title} {{ #{one.anchor} }}\n\nRead by {read_by}.{flags}\n")
        by_table: dict[str, list[Option]] = {}
        for option in options_of(one.struct):
            by_table.setdefault(option.key.rpartition(".")[0], []).append(option)
        for prefix, found in by_table.items():
            if prefix:
                parts.append(f"### `{prefix}` {{ #{one.anchor}-{_slug(prefix)} }}\n")
            parts.append(table(("key", "type", "default", "what it does"), map(_cells, found)))
    return "\n".join(parts)


def _slug(prefix: str) -> str:
    return prefix.replace("[]", "").replace(".", "-").replace("_", "-")


def _cells(option: Option) -> tuple[str, str, str, str]:
    return f"`{option.key}`", option.type_name, f"`{option.default}`", option.description
