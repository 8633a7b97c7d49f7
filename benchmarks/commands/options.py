"""Options that several commands have, and what their words mean."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, TypeAlias, TypeVar, cast

import typer

from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from pdserve.kvpool.protocol.messages import DataPathChoice

PATHS: Final[tuple[DataPathChoice, ...]] = ("shm", "ucx", "tcp")

AsJson: TypeAlias = Annotated[
    bool, typer.Option("--json", help="Print JSON lines: the origin, then each result.")
]
Plot: TypeAlias = Annotated[Path | None, typer.Option(help="Plot the results into this PNG file.")]
Out: TypeAlias = Annotated[
    Path | None, typer.Option(help="Write logs, configuration and records to this directory.")
]
DataPath: TypeAlias = Annotated[str, typer.Option(help="Data path of all clients: shm, ucx or tcp.")]
NodeCapacity: TypeAlias = Annotated[str, typer.Option(help="Memory of each node.")]
PoolCapacity: TypeAlias = Annotated[str, typer.Option(help="Memory of the pool node.")]
PageSizes: TypeAlias = Annotated[str, typer.Option(help="Page sizes, separated by commas.")]
Nodes: TypeAlias = Annotated[int, typer.Option(min=1, help="Pool nodes.")]

T = TypeVar("T", bound=str)


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


def choices(option: str, text: str, allowed: tuple[T, ...]) -> list[T]:
    """Words separated by commas. Raises ConfigError for one that is not allowed."""
    words = text.split(",")
    for word in words:
        if word not in allowed:
            raise ConfigError(f"--{option}: '{word}' is not one of {', '.join(allowed)}")
    return cast("list[T]", words)


def numbers(option: str, text: str) -> list[int]:
    """Whole numbers separated by commas. Raises ConfigError."""
    words = text.split(",")
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise ConfigError(f"--{option}: {text!r} is no list of positive numbers separated by commas")
    return [int(word) for word in words]
