"""The check as a whole, without a GPU, and with a process that dies or hangs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu_check import run
from benchmarks.gpu_check.checks import NO_GPU, Check, Group, Result
from benchmarks.gpu_check.place import Place
from tests.support.up.scripts import LAUNCH

pytestmark = pytest.mark.long

GROUP = Group("g", 30.0, (Check("a", "is a"), Check("b", "is b")))


def checked(
    tmp_path: Path, program: str, monkeypatch: pytest.MonkeyPatch, total_s: float = 60.0
) -> list[Result]:
    """With a program in place of a group's process; it finds its place's file in sys.argv[-1]."""
    (tmp_path / "python").write_text(f"#!{sys.executable}\nimport sys, os\n{program}\n")
    (tmp_path / "python").chmod(0o700)
    monkeypatch.setattr(run.sys, "executable", str(tmp_path / "python"))

    def place_of(group: Group) -> Place:
        return Place(
            group=group.name, directory=str(tmp_path), memory="", model="", device="cpu", checks_all=True
        )

    return run.run_check([GROUP], place_of, lambda _: None, total_s)


def test_a_group_that_dies_fails_the_check_it_was_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = '{"check": "a", "outcome": "passed", "says": "", "seconds": 1.0}'
    file = str(tmp_path / "g.jsonl")
    program = f"open({file!r}, 'w').write('{line}')\nprint('no memory', flush=True)\nos._exit(3)"
    found = checked(tmp_path, program, monkeypatch)
    assert [(one.check, one.outcome) for one in found] == [("a", "passed"), ("b", "failed")]
    assert found[1].says == "its process ended with 3: no memory"


def test_a_group_that_hangs_is_ended_at_its_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_DFL)\nsignal.pause()"
    found = checked(tmp_path, program, monkeypatch, total_s=1.0)
    assert [one.outcome for one in found] == ["failed", "skipped"]
    assert found[0].says == "it did not end within 1 s"


def test_no_time_left_skips_what_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = checked(tmp_path, "raise SystemExit(9)", monkeypatch, total_s=0.0)
    assert [(one.outcome, one.says) for one in found] == [("skipped", "no time was left of 0 s")] * 2


def test_the_script_runs_here_without_a_gpu_and_says_so(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            LAUNCH / "gpu_check.sh",
            "--out",
            tmp_path,
            "--model",
            "none",
            *("--only", "machine"),
            "--only",
            "gaps",
        ],
        env={**os.environ, "PDSERVE_PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "report.jsonl").read_text().splitlines()]
    outcomes = {one["check"]: (one["outcome"], one["says"]) for one in lines[1:]}
    assert outcomes["machine"][0] == "passed"
    assert outcomes["packages"] == outcomes["bench gaps"] == ("skipped", NO_GPU)
    assert "1 passed, 0 failed, 2 skipped" in (tmp_path / "report.md").read_text()


def test_pages_of_a_device_come_back_from_a_pool(tmp_path: Path) -> None:
    """The CPU stands for the GPU."""
    words = ("--on-cpu", "--only", "tensors", "--out", str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-m", "pdserve", "bench", "gpu-check", *words],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = (tmp_path / "report.md").read_text()
    assert "| copies direct | passed |" in report
    assert "5 pages written and 5 read by a page mover; 1310720 bytes are the same" in report


CHANGED = """
from pdserve.engine.sglang import prepare
prepare.choose("cpu")
prepare.load_plugins()
from pdserve.engine.sglang.trials.device_pages import DevicePages
from pdserve.errors import StartupError
for where in 100, -1:
    pages = DevicePages("cpu", "page_first_direct", "direct")
    pages.to_host()
    pages.forget_device()
    pages.host.kv_buffer.view(-1)[where] += 1
    pages.from_host()
    try:
        print(where, pages.check())
    except StartupError as error:
        print(where, error)
"""


def test_a_page_that_changed_on_its_way_is_seen() -> None:
    """The first page of host memory holds a used page, the last one none."""
    done = subprocess.run(
        [sys.executable, "-c", CHANGED],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    used, unused = done.stdout.splitlines()[-2:]
    assert used.startswith("100 ")
    assert "pages came back changed" in used, done.stderr
    assert unused.startswith("-1 ")
    assert "1310720" in unused
