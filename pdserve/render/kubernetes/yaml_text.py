"""Objects of Kubernetes as YAML. Pure."""

from __future__ import annotations

from typing import Any

import yaml

WIDTH = 110


class _Text(yaml.SafeDumper):  # type: ignore[misc]  # PyYAML has no types
    """Plain YAML: no aliases, long texts as blocks."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Text.add_representer(str, _represent_text)


def to_yaml(*documents: dict[str, Any]) -> str:
    """Keys in the order in which they were put, so that the text is the same each time."""
    text: str = yaml.dump_all(
        documents, Dumper=_Text, sort_keys=False, width=WIDTH, explicit_start=len(documents) > 1
    )
    return text
