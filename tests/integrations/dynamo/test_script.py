"""launch/dynamo.sh, with stand-ins for what it starts: when it says that it is ready, and what it leaves."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pdserve.up.places.sessions import session_members
from tests.support.up.scripts import LAUNCH, program

SOON_S = 60.0
CURL = """
printf '%s\\n' "$*" >>{root}/asked
case "$*" in
  *completions*) test -e {root}/answers ;;
  *models*) echo '{{"data": [{{"id": "m"}}]}}' ;;
  *health*) cat {root}/health ;;
esac
"""


def until(condition: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.02)  # between looks


def health(*workers: int) -> str:
    """As Dynamo's frontend says it."""
    begin = '{"component":"backend","endpoint":"generate","namespace":"dynamo","instance_id":'
    end = ',"transport":{"tcp":"192.0.2.2:33837/ea7b3d9758c60bf6/dynamo/backend/generate"}}'
    return '{"instances":[' + ",".join(f"{begin}{worker}{end}" for worker in workers) + "]}"


class Script:
    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "launch").mkdir()
        shutil.copy(LAUNCH / "dynamo.sh", root / "launch")
        (root / "launch/setup.sh").write_text(
            f"root={root} venv={root}/.venv\n"
            'say() { echo "$*" >&2; }\nfail() { say "error: $*"; exit 1; }\n'
        )
        stays = f"echo $$ >>{root}/started; exec sleep 600"
        program(root / ".venv/bin/pdserve", stays)
        program(root / ".venv-dynamo/bin/python", stays)
        program(root / "bin/curl", CURL.format(root=root))
        version = (LAUNCH / "dynamo.sh").read_text().partition("version=")[2].split()[0]
        (root / ".venv-dynamo/pdserve-setup").write_text(f"{version} {root}/.venv\n")

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        run = ["--run-dir", str(self.root / "run"), "--arena-dir", str(self.root / "arena")]
        with (self.root / "said").open("wb") as said:
            self.process = subprocess.Popen(
                [self.root / "launch/dynamo.sh", *words, "--model", "/models/m", *run],
                env={**os.environ, "PATH": f"{self.root}/bin:{os.environ['PATH']}"},
                stderr=said,
                start_new_session=True,
            )
        return self.process

    def said(self) -> str:
        return (self.root / "said").read_text()

    def asked(self, of: str) -> list[str]:
        path = self.root / "asked"
        return [line for line in path.read_text().splitlines() if of in line] if path.exists() else []

    def started(self) -> list[int]:
        path = self.root / "started"
        return [int(line) for line in path.read_text().split()] if path.exists() else []

    def has_left_nothing(self) -> bool:
        return not any(map(session_members, self.started()))


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Script]:
    script = Script(tmp_path)
    try:
        yield script
    finally:
        script.process.kill()
        script.process.wait()
        until(script.has_left_nothing, "what it started ended with it")


def test_it_is_ready_once_every_worker_has_answered(script: Script) -> None:
    (script.root / "health").write_text(health(7))
    process = script.start("agg", "--workers", "2")
    until(lambda: len(script.asked("/health")) >= 2, "it looks for its workers")
    assert script.asked("completions") == []  # one of two is there
    (script.root / "health").write_text(health(7, 8))
    until(lambda: len(script.asked("completions")) >= 2, "it asks")
    assert "ready: http" not in script.said()  # listed, and not served: 404
    (script.root / "answers").touch()
    until(lambda: "ready: http" in script.said(), "it says that it is ready")
    answered = script.asked("completions")[-2:]
    assert ["worker-instance-id: 7" in answered[0], "worker-instance-id: 8" in answered[1]] == [True, True]
    process.send_signal(signal.SIGTERM)
    assert process.wait(SOON_S) == 143
    assert len(script.started()) == 4  # pool, two workers, frontend
    assert script.has_left_nothing()


def test_it_fails_when_a_process_ends_and_ends_the_others(script: Script) -> None:
    program(script.root / ".venv/bin/pdserve", "exit 3")
    (script.root / "health").write_text(health())
    process = script.start("disagg")
    assert process.wait(SOON_S) == 1
    assert "error: a process has ended" in script.said()
    assert script.has_left_nothing()


def test_what_it_started_ends_with_it_though_it_is_killed(script: Script) -> None:
    (script.root / "health").write_text(health(7))
    (script.root / "answers").touch()
    process = script.start("agg", "--workers", "1")
    until(lambda: "ready: http" in script.said(), "it says that it is ready")
    process.kill()
    process.wait()
    until(script.has_left_nothing, "what it started ended with it")
