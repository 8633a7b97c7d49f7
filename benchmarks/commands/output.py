"""What a command prints: its origin first, then results as JSON lines or as text for people."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import typer

if TYPE_CHECKING:
    from rich.table import Table


class Judged(Protocol):
    """An outcome (a msgspec struct) that reached its goal or did not."""

    @property
    def passed(self) -> bool: ...


class Output:
    """Where all commands print their results."""

    def __init__(self, as_json: bool, plot: Path | None = None, **load: object) -> None:
        """Print the origin: a JSON line that `load` is added to, or a line of text. Raises BenchError where
        `plot` is given and cannot be drawn.
        """
        from benchmarks.origin import in_words, provenance
        from benchmarks.plot import pyplot

        if plot is not None:
            pyplot()  # before the work
        self._as_json = as_json
        origin = provenance()
        typer.echo(json.dumps({**origin, **load}) if as_json else in_words(origin))

    def row(self, result: object, **more: object) -> None:
        """One result (a msgspec struct or a dict) as a JSON line, with `more` in place of its own."""
        import msgspec

        if self._as_json:
            plain: dict[str, Any] = msgspec.to_builtins(result)
            typer.echo(json.dumps({**plain, **more}))

    def show(self, *shown: Table | str, width: int = 0) -> None:
        """Tables and lines for people. `width`: the least that a table has."""
        from rich.console import Console

        console = Console()
        console.width = max(console.width, width)
        for one in () if self._as_json else shown:
            if isinstance(one, str):
                typer.echo(one)
            else:
                console.print(one)

    def conclude(self, outcome: Judged, show: Callable[[], Sequence[Table | str]]) -> None:
        """Print a judged outcome. Raises typer.Exit where it did not pass."""
        if self._as_json:
            self.row(outcome, passed=outcome.passed)
        else:
            self.show(*show())
        if not outcome.passed:
            raise typer.Exit(1)


def say(line: str) -> None:
    """Progress, beside the results."""
    typer.echo(line, err=True)


def failed_with(problems: Sequence[str]) -> None:
    """Say what went wrong, a line each. Raises typer.Exit where anything did."""
    for problem in problems:
        say(f"FAILED: {problem}")
    if problems:
        raise typer.Exit(1)


@contextmanager
def workplace(out: Path | None = None) -> Iterator[Path]:
    """A directory until the block ends; `out`, which stays, where it is given. SIGTERM ends the block."""
    import tempfile

    from benchmarks.processes import stopped_cleanly

    with stopped_cleanly(), tempfile.TemporaryDirectory(prefix="pdserve-bench-") as directory:
        kept = out or Path(directory)
        kept.mkdir(parents=True, exist_ok=True)
        yield kept
