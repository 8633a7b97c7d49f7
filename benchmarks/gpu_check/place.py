"""Where and with what a group of checks runs."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from typing import Literal

import msgspec

from benchmarks.stores import BenchError

LAST_LINES = 3


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """`directory`: for logs and configuration, stays. `memory`: for pages."""

    group: str
    directory: str
    memory: str
    model: str
    device: Literal["cpu", "cuda"]
    checks_all: bool
    """Those too that are of a GPU: there is one, or the CPU stands for it."""

    @property
    def results(self) -> str:
        """The file of its results, a line of JSON each."""
        return f"{self.directory}/{self.group}.jsonl"


class Skipped(Exception):
    """A check cannot run here; why."""


def output_of(command: Sequence[str], within_s: float, environment: dict[str, str] | None = None) -> str:
    """What a command prints. Raises BenchError where it fails or takes longer."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=within_s, check=False, env=environment
        )
    except subprocess.TimeoutExpired:
        raise BenchError(f"{command[0]} did not end within {within_s:.0f} s") from None
    except OSError as error:
        raise BenchError(f"{command[0]} cannot be started: {error.strerror}") from None
    if done.returncode:
        last = " / ".join((done.stderr or done.stdout).strip().splitlines()[-LAST_LINES:])
        raise BenchError(f"{command[0]} ended with {done.returncode}: {last}")
    return done.stdout
