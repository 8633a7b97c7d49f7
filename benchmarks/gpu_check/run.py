"""The check as a whole: a process for each group, with a deadline of its own and one for all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from benchmarks.gpu_check.checks import TOTAL_S, Group, Result, missing, not_here
from benchmarks.gpu_check.place import LAST_LINES, Place

STOP_S: Final = 15.0
_result = msgspec.json.Decoder(Result)


def run_check(
    groups: Sequence[Group],
    place_of: Callable[[Group], Place],
    say: Callable[[Result], None],
    total_s: float = TOTAL_S,
) -> list[Result]:
    """Results of all checks of these groups, in their order, within `total_s`; each group's are said at its
    end.
    """
    deadline_s = time.monotonic() + total_s
    results: list[Result] = []
    for group in groups:
        place = place_of(group)
        skipped = [] if place.checks_all else not_here(group)
        found = list(skipped)
        if len(skipped) < len(group.checks):
            left_s = min(group.limit_s, deadline_s - time.monotonic())
            if left_s <= 0:
                why = f"no time was left of {total_s:.0f} s"
                found += [
                    Result(check=check.name, outcome="skipped", says=why)
                    for check in group.checks
                    if check.name not in {one.check for one in found}
                ]
            else:
                why = _run(place, left_s)
                found += _read(place)
                found += missing(group, found, why)
        by_name = {one.check: one for one in found}
        for check in group.checks:
            say(by_name[check.name])
            results.append(by_name[check.name])
    return results


def _run(place: Place, limit_s: float) -> str:
    """Do a group's checks; why it did not come to its end, if it did not."""
    directory = Path(place.directory)
    file, log = directory / f"{place.group}.json", directory / f"{place.group}.log"
    Path(place.results).unlink(missing_ok=True)
    file.write_bytes(msgspec.json.encode(place))
    command = [sys.executable, "-m", "benchmarks.gpu_check.group", str(file)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        status = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return f"it did not end within {limit_s:.0f} s"
    finally:
        _end(process)
    last = " / ".join(log.read_text(errors="replace").strip().splitlines()[-LAST_LINES:])
    return f"its process ended with {status}: {last}" if status else "it was not done"


def _end(process: subprocess.Popen[bytes]) -> None:
    """It and what is in its session; servers of its own have a reaper, which sees its end."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
            return


def _read(place: Place) -> list[Result]:
    try:
        lines = Path(place.results).read_bytes().splitlines()
    except OSError:
        return []
    return [_result.decode(line) for line in lines]
