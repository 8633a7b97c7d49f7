"""A program on another host that is told what to do by lines of JSON. One line answers each."""

from __future__ import annotations

import json
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.netns.lab import Lab, last_lines

ANSWER_TIMEOUT_S = 120.0


class Program:
    """`python -m MODULE ARGUMENTS` on that host; after it `{"do": NAME, ...}` calls a method there."""

    def __init__(self, network: Lab, host: str, log_path: Path, *command: str) -> None:
        self._log_path = log_path
        with log_path.open("wb") as log:
            self._process = network.start(host, *command, log=log, pipes=True)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in, self._out = self._process.stdin, self._process.stdout

    def ask(self, do: str, **more: Any) -> None:
        self._in.write(json.dumps({"do": do, **more}).encode() + b"\n")
        self._in.flush()

    def answer(self, timeout_s: float = ANSWER_TIMEOUT_S) -> dict[str, Any]:
        ready, _, _ = select.select([self._out], [], [], timeout_s)
        assert ready, f"the program hangs: {last_lines(self._log_path)}"
        line = self._out.readline()
        assert line, last_lines(self._log_path)
        answer: dict[str, Any] = json.loads(line)
        return answer

    def do(self, what: str, **more: Any) -> dict[str, Any]:
        self.ask(what, **more)
        return self.answer()

    @property
    def runs(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        if self._process.poll() is None:
            self._in.close()
            try:
                assert self._process.wait(15) == 0, last_lines(self._log_path)
            except subprocess.TimeoutExpired:
                pytest.fail(f"the program does not end: {last_lines(self._log_path)}")
            finally:
                self.kill()


def obey(what: object) -> None:
    """Of such a program: call the methods of `what` until standard input ends."""
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(getattr(what, asked.pop("do"))(**asked)), flush=True)
