"""The generated parts of README.md: `python -m tests.readme` writes them, test_readme.py checks them."""

from __future__ import annotations

from pathlib import Path

from pdserve.config import option_table
from pdserve.engine.worker import WorkerConfig
from pdserve.kvpool.config import PoolNodeConfig
from pdserve.router.config import RouterConfig
from pdserve.up.config import ClusterSettings

README = Path(__file__).parents[1] / "README.md"

TABLES = {
    "[cluster] and <code>pdserve up</code>": ClusterSettings,
    "[router] and <code>pdserve router</code>": RouterConfig,
    "[worker], [[prefill]], [[decode]], [[agg]]; <code>pdserve prefill|decode|agg</code>": WorkerConfig,
    "[[pool]] and <code>pdserve pool serve</code>": PoolNodeConfig,
}


def options() -> str:
    """The option tables, each folded away under its title."""
    parts = [
        f"<details><summary>{title}</summary>\n\n{option_table(type_)}\n</details>\n"
        for title, type_ in TABLES.items()
    ]
    return "\n".join(parts)


def with_block(text: str, name: str, block: str) -> str:
    """`text` with the lines between the markers of `name` replaced."""
    begin, end = f"<!-- {name}:begin -->\n", f"<!-- {name}:end -->"
    head, rest = text.split(begin)
    return head + begin + block + end + rest.split(end, 1)[1]


def generated(text: str) -> str:
    """README.md as it should be."""
    return with_block(text, "options", options())


if __name__ == "__main__":
    README.write_text(generated(README.read_text()))
