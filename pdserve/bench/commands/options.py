"""Options that several commands have."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import typer

from pdserve.errors import ConfigError


class Judged(Protocol):
    """An outcome (a msgspec struct) that reached its goal or did not."""

    @property
    def passed(self) -> bool: ...


def page_sizes(text: str) -> list[int]:
    """Sizes separated by commas, in bytes. Raises ConfigError."""
    from pdserve.sizes import parse_bytes

    try:
        sizes = [parse_bytes(word) for word in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"--pages: {error}") from error
    if min(sizes) < 64:
        raise ConfigError(f"--pages: pages have at least 64 bytes, found {min(sizes)}")
    return sizes


def choices(option: str, text: str, allowed: tuple[str, ...]) -> list[str]:
    """Words separated by commas. Raises ConfigError for one that is not allowed."""
    words = text.split(",")
    for word in words:
        if word not in allowed:
            raise ConfigError(f"--{option}: '{word}' is not one of {', '.join(allowed)}")
    return words


def conclude(outcome: Judged, as_json: bool, show: Callable[[], None]) -> None:
    """Print an outcome, as one JSON object or by `show`. Raises typer.Exit where it did not pass."""
    import msgspec

    if as_json:
        told: dict[str, Any] = msgspec.to_builtins(outcome)
        typer.echo(json.dumps({**told, "passed": outcome.passed}))
    else:
        show()
    if not outcome.passed:
        raise typer.Exit(1)


def failed_with(problems: Sequence[str]) -> None:
    """Say what went wrong, a line each. Raises typer.Exit where anything did."""
    for problem in problems:
        typer.echo(f"FAILED: {problem}", err=True)
    if problems:
        raise typer.Exit(1)
