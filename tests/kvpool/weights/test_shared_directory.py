"""The directory of a model's small files: it goes with its process, and with no other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from pdserve.kvpool.weights.files import FILES_VARIABLE, shared_directory

HOLDER = """
import sys
from pdserve.kvpool.weights.files import shared_directory
print(shared_directory({}), flush=True)
sys.stdin.read()
"""


def held_by_another_process() -> tuple[subprocess.Popen[str], Path]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


@pytest.fixture(autouse=True)
def own_temporary_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)


def test_a_directory_whose_owner_this_process_cannot_see_stays() -> None:
    """Containers that share /tmp and a user have process ids of their own."""
    process, made = held_by_another_process()
    elsewhere = made.with_name(made.name.replace(f"-{process.pid}-", "-4194999-"))
    made.rename(elsewhere)  # as if the id were of another container: here is no such process
    try:
        shared_directory({})
        assert elsewhere.is_dir()
    finally:
        process.kill()
        process.communicate()
    shared_directory({})
    assert not elsewhere.exists(), "its owner has ended"


def test_the_directory_of_a_process_that_was_killed_goes_though_its_number_is_used_again() -> None:
    process, made = held_by_another_process()
    process.send_signal(signal.SIGKILL)
    process.communicate()
    reused = made.with_name(made.name.replace(f"-{process.pid}-", f"-{os.getppid()}-"))
    made.rename(reused)
    environ: dict[str, str] = {}
    mine = shared_directory(environ)
    assert not reused.exists()
    assert environ == {FILES_VARIABLE: str(mine)}
    assert shared_directory(environ) == mine
