"""What a benchmark prints: its origin first (command, commit, machine, versions), then results as tables for
people, as markdown for the documentation, or as JSON lines to keep.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias, TypeVar, cast

import msgspec
import psutil
import typer

from pdserve.errors import ConfigError, PdserveError
from pdserve.sizes import parse_bytes
from tests.support.processes import stopped_cleanly

Format: TypeAlias = Literal["text", "markdown", "json"]
FormatOption: TypeAlias = Annotated[
    Format, typer.Option("--format", help="text: tables; markdown: for the documentation; json: raw lines.")
]
OutOption: TypeAlias = Annotated[
    Path | None, typer.Option("--out", help="Keep logs, configuration and records in this directory.")
]
Seed: TypeAlias = Annotated[int, typer.Option(min=0, help="Seed of lengths, texts and arrivals.")]
Silence: TypeAlias = Annotated[float, typer.Option(min=0.1, help="Longest silence of a server, in seconds.")]
PACKAGES: Final = (
    *("sglang", "torch", "ucxx-cu13", "numpy", "mooncake-transfer-engine-non-cuda"),
    *("sglang-router", "smg", "vllm-router"),
)
UNCOUNTED: Final = (":/", ":(top,exclude)benchmarks/results", ":(top,exclude)README.md", ":(top,exclude)docs")

T = TypeVar("T", bound=str)


class Table(msgspec.Struct):
    """Columns of figures are aligned right, those named in `left` left."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: Collection[str] = ()

    def text(self) -> str:
        widths = [max(map(len, column)) for column in zip(self.columns, *self.rows, strict=True)]
        lines = [
            "  ".join(
                cell.ljust(width) if name in self.left else cell.rjust(width)
                for name, cell, width in zip(self.columns, row, widths, strict=True)
            ).rstrip()
            for row in (self.columns, *self.rows)
        ]
        return "\n".join([self.title, lines[0], "-" * len(lines[0]), *lines[1:], ""])

    def markdown(self) -> str:
        marks = ["---" if name in self.left else "---:" for name in self.columns]
        lines = [f"| {' | '.join(row)} |" for row in (self.columns, marks, *self.rows)]
        return "\n".join([f"{self.title}:", "", *lines, ""])


class Output:
    """Where all benchmarks print their results."""

    def __init__(self, format: Format, **load: object) -> None:
        """Print the origin; as a JSON line with `load` added to it."""
        self.format = format
        origin = provenance()
        typer.echo(json.dumps({**origin, **load}) if format == "json" else in_words(origin))
        if format == "markdown":
            typer.echo("")

    def row(self, result: object, **more: object) -> None:
        """One result (a msgspec struct or a dict) as a JSON line; `more` replaces or adds fields."""
        if self.format == "json":
            plain: dict[str, Any] = msgspec.to_builtins(result)
            typer.echo(json.dumps({**plain, **more}))

    def show(self, *shown: Table | str) -> None:
        """Tables and lines for people."""
        for one in () if self.format == "json" else shown:
            if isinstance(one, str):
                typer.echo(one)
            else:
                typer.echo(one.markdown() if self.format == "markdown" else one.text())


def script(main: Callable[..., None], help: str | None) -> None:
    """Run a benchmark's `main` with the command line. What it raises for people is a line, and status 2."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(help=help)(main)
    try:
        app()
    except PdserveError as error:
        say(str(error))
        sys.exit(2)


def say(line: str) -> None:
    """Progress, beside the results."""
    typer.echo(line, err=True)


def fail_with(problems: Sequence[str]) -> None:
    """Say what went wrong, a line each. Raises typer.Exit where anything did."""
    for problem in problems:
        say(f"FAILED: {problem}")
    if problems:
        raise typer.Exit(1)


@contextmanager
def workplace(out: Path | None = None) -> Iterator[Path]:
    """A directory until the block ends; `out`, which stays, where it is given. SIGTERM ends the block."""
    with stopped_cleanly(), tempfile.TemporaryDirectory(prefix="pdserve-bench-") as directory:
        kept = out or Path(directory)
        kept.mkdir(parents=True, exist_ok=True)
        yield kept


# --- words of options


def choices(option: str, text: str, allowed: Sequence[T]) -> list[T]:
    """Words separated by commas. Raises ConfigError for one that is not allowed."""
    words = text.split(",")
    for word in words:
        if word not in allowed:
            raise ConfigError(f"--{option}: '{word}' is not one of {', '.join(allowed)}")
    return cast("list[T]", words)


def numbers(option: str, text: str) -> list[int]:
    """Positive whole numbers separated by commas. Raises ConfigError."""
    words = text.split(",")
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise ConfigError(f"--{option}: {text!r} is no list of positive numbers separated by commas")
    return [int(word) for word in words]


def page_sizes(text: str) -> list[int]:
    """Sizes separated by commas, in bytes. Raises ConfigError."""
    try:
        sizes = [parse_bytes(word) for word in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"--pages: {error}") from error
    if min(sizes) < 64:
        raise ConfigError(f"--pages: pages have at least 64 bytes, found {min(sizes)}")
    return sizes


def size_name(size_bytes: int) -> str:
    """65536 is "64 KiB"."""
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if size_bytes % unit == 0:
            return f"{size_bytes // unit} {name}"
    return f"{size_bytes} B"


def times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} ×"


def ms(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


# --- where figures come from


def provenance(packages: Sequence[str] = PACKAGES) -> dict[str, Any]:
    """Date, commit, machine, load, command and versions."""
    name = Path(sys.argv[0]).with_suffix("").as_posix().rpartition("benchmarks/")[2].removesuffix("/__main__")
    command = ["python", "-m", f"benchmarks.{name}", *sys.argv[1:]]
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "commit": _commit(),
        "machine": _machine(),
        "load_before": [round(load, 2) for load in os.getloadavg()],
        "command": " ".join(command),
        "versions": {"python": platform.python_version(), **_installed(packages)},
    }


def in_words(origin: Mapping[str, Any]) -> str:
    """An origin for people, in a line."""
    commit, date = origin["commit"] or "unknown", origin["date"][:10]
    return f"`{origin['command']}` (commit {commit}, {date}, {origin['machine']})"


def _machine() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    memory_gib = psutil.virtual_memory().total / 2**30
    processor = names[0] if names else platform.machine()
    return f"{psutil.cpu_count() or 0} cores of {processor}, {memory_gib:.0f} GiB, {platform.system()}"


def _commit() -> str:
    """Of this checkout; empty where there is none. A + says that it was changed since, results and documents
    aside.
    """

    def git(*words: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *words]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    try:
        changed = git("status", "--porcelain", "-uno", "--", *UNCOUNTED)
        return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")
    except OSError:
        return ""


def _installed(packages: Iterable[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for package in packages:
        for one in importlib.metadata.distributions(name=package):
            found.setdefault(package, one.version)  # what is imported is the first
    return found
