"""The compiled instruments: built into the benchmark's own directory, and run from there."""

from __future__ import annotations

import shutil
import subprocess
import threading
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, TypeVar

import msgspec
import psutil

from benchmarks.router.load import CONNECT_TIMEOUT_S, FINISH_TIMEOUT_S, Load, Loaded, make_requests
from benchmarks.router.mock import entries
from benchmarks.stores import BenchError

SOURCES: Final = Path(__file__).parent
COMPILERS: Final = ("cc", "gcc", "clang")
BUILD_TIMEOUT_S: Final = 60.0

T = TypeVar("T")


class Instruments(msgspec.Struct, frozen=True):
    """The programs, and where they keep their files."""

    load: Path
    worker: Path
    directory: Path

    def worker_command(self, port: int, role: str, host_socket: str = "") -> Sequence[str]:
        """Runs a mock worker, which also listens on the `host_socket` of this name. It ends when its standard
        input does.
        """
        answers = self.directory / f"{role}{'-unix' if host_socket else ''}.answers"
        said = entries(role, host_socket).items()
        answers.write_bytes(b"".join(b"%b %d\n%b" % (name.encode(), len(of), of) for name, of in said))
        return [str(self.worker), str(port), str(answers), role, *([host_socket] if host_socket else [])]

    def run_load(self, load: Load, port: int, look: Callable[[psutil.Process], T]) -> tuple[Loaded, T, T]:
        """As `load.run_load`, by a process of its own, which `look` is told of. Raises BenchError."""
        requests, result = self.directory / "requests", self.directory / "result"
        requests.write_bytes(b"".join(b"%d\n%b" % (len(one), one) for one in make_requests(load, port)))
        result.unlink(missing_ok=True)
        times = (load.seconds, load.chunks, load.ramp_s, load.warm_up_s, FINISH_TIMEOUT_S, load.pipelined)
        command = [str(self.load), str(port), str(requests), str(result), str(load.streams), *map(str, times)]
        limit_s = CONNECT_TIMEOUT_S + load.ramp_s + load.warm_up_s + load.seconds + FINISH_TIMEOUT_S
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            too_late = threading.Timer(limit_s, process.kill)
            too_late.start()
            try:
                assert process.stdout is not None
                seen = psutil.Process(process.pid)
                words = iter(process.stdout.readline, "")
                looks = [look(seen) for word in words if word in ("begin\n", "end\n")]
                _, errors = process.communicate()
            finally:
                too_late.cancel()
                process.kill()
        if process.returncode or len(looks) != 2 or not result.exists():
            raise BenchError(f"the load on port {port} failed: {errors.strip() or process.returncode}")
        before, after = looks
        return _read(result), before, after


def _read(path: Path) -> Loaded:
    done = Loaded(first_ms=array("d"), chunk_ms=array("d"))
    with path.open("rb") as file:
        seconds, requests, errors, firsts, times = file.readline().split()
        done.seconds, done.requests, done.errors = float(seconds), int(requests), int(errors)
        done.first_error = file.readline().decode("utf-8", "replace").strip()
        done.first_ms.frombytes(file.read(8 * int(firsts)))
        done.chunk_ms.frombytes(file.read(8 * int(times)))
    return done


def build(directory: Path, said: Callable[[str], None]) -> Instruments | None:
    """The instruments, compiled into `directory`. None where that cannot be done, of which `said` is told."""
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        said("no C compiler: load and mock workers are Python, and may be slower than what they measure")
        return None
    try:
        load, worker = (_compile(compiler, name, directory) for name in ("load", "worker"))
    except (OSError, subprocess.SubprocessError) as error:
        said(f"load and mock workers are Python, since the compiled ones could not be built: {error}")
        return None
    return Instruments(load, worker, directory)


def _compile(compiler: str, name: str, directory: Path) -> Path:
    program = directory / name
    command = [compiler, "-std=gnu11", "-O2", "-o", str(program), str(SOURCES / f"{name}.c")]
    subprocess.run(command, check=True, capture_output=True, timeout=BUILD_TIMEOUT_S)
    return program
