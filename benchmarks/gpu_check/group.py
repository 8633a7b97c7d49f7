"""One group of checks in a process of its own: `python -m benchmarks.gpu_check.group PLACE.json`."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final, Literal, TypeAlias

import msgspec

from benchmarks.gpu_check import machine, serving, tensors, transports
from benchmarks.gpu_check.checks import GROUPS, Result
from benchmarks.gpu_check.place import Place, Skipped

Step: TypeAlias = tuple[str, Callable[[], str]]
"""(name of a check, what does it and says what it saw)"""
_STEPS: Final[Mapping[str, Callable[[Place], Iterator[Step]]]] = {
    "machine": machine.steps,
    "sglang": machine.sglang_steps,
    "tensors": tensors.steps,
    "transports": transports.steps,
    "serving": serving.steps,
    "gaps": serving.gap_steps,
}


def run(place: Place, write: Callable[[Result], None]) -> None:
    """All checks of the group that can run here. A step may need what earlier ones left."""
    wanted = {
        check.name
        for group in GROUPS
        if group.name == place.group
        for check in group.checks
        if place.checks_all or not check.needs_gpu
    }
    for name, work in _STEPS[place.group](place):
        if name in wanted:
            write(_result(name, work))


def _result(name: str, work: Callable[[], str]) -> Result:
    started_s = time.monotonic()
    outcome: Literal["passed", "failed", "skipped"] = "passed"
    try:
        says = work()
    except Skipped as error:
        outcome, says = "skipped", str(error)
    # boundary: whatever a check raises is its result, and the next checks run
    except Exception as error:
        outcome, says = "failed", f"{type(error).__name__}: {error}"
    seconds = round(time.monotonic() - started_s, 1)
    return Result(check=name, outcome=outcome, says=says, seconds=seconds)


def main(path: str) -> None:
    """Results go to a file beside the place's own, a line each."""
    place = msgspec.json.decode(Path(path).read_bytes(), type=Place)
    file = os.open(place.results, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        run(place, lambda result: _write(file, result))
    finally:
        os.close(file)


def _write(file: int, result: Result) -> None:
    os.write(file, msgspec.json.encode(result) + b"\n")


if __name__ == "__main__":
    main(sys.argv[1])
