"""launch/setup.sh in a checkout of its own, over stand-ins for `uv` and Python's installer."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.up.cluster import wait_until
from tests.support.up.scripts import LAUNCH, program

UV = """
echo "$*" >>"$ASKED"
for last; do :; done
if [ "$1" = venv ]; then
  rm -rf "$last"
  mkdir -p "$last/bin"
  own='[ "$1" != -m ] || { shift; echo "$@" >>"$ASKED"; exit; }'
  printf '#!/bin/bash\\n%s\\nexec "$PYTHON" "$@"\\n' "$own" >"$last/bin/python"
  chmod +x "$last/bin/python"
fi
{more}
"""


class Checkout:
    """A copy of what setup.sh reads, with `uv` replaced; `more`: further lines of bash for that."""

    def __init__(self, root: Path, tools: Path, more: str = "") -> None:
        self.root, self.tools, self.asked = root, tools, tools / "asked"
        self.venv = root / ".venv"
        (root / "launch").mkdir(parents=True)
        for name in ("setup.sh", "without-cuda.txt", "constraints.txt"):
            shutil.copy(LAUNCH / name, root / "launch")
        shutil.copy(LAUNCH.parent / "pyproject.toml", root)
        program(tools / "uv", UV.replace("{more}", more))
        (tools / "python3").unlink(missing_ok=True)
        program(tools / "python3", f'exec {sys.executable} "$@"')
        program(tools / "nvidia-smi", "exit 1")

    def start(self, *extras: str) -> subprocess.Popen[str]:
        path = f"{self.tools}:/usr/bin:/bin"
        variables = {"PATH": path, "ASKED": str(self.asked), "PYTHON": sys.executable}
        return subprocess.Popen(
            [str(self.root / "launch/setup.sh"), *extras],
            env=os.environ | variables,
            stderr=subprocess.PIPE,
            text=True,
        )

    def set_up(self, *extras: str) -> tuple[int, list[str]]:
        """Exit status, and what was done: `venv` where .venv was made anew."""
        self.asked.unlink(missing_ok=True)
        process = self.start(*extras)
        process.communicate(timeout=60)
        return process.returncode, self.words()

    def lines(self) -> list[str]:
        asked = self.asked.read_text().splitlines() if self.asked.exists() else []
        return [line for line in asked if "--dry-run" not in line]

    def words(self) -> list[str]:
        return [line.split()[0] for line in self.lines()]

    def installed(self) -> set[str]:
        """What the last installation was asked for."""
        [line] = [line for line in self.lines() if line.startswith("pip")]
        return set(line.split())


INSTALLED = ["pip", "pdserve.engine.first_import"]
"""Over what is there, and what a worker imports is compiled."""


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    made = Checkout(tmp_path / "one", tmp_path / "bin")
    assert made.set_up() == (0, ["venv", *INSTALLED])
    return made


def change_requirements(checkout: Checkout) -> None:
    with (checkout.root / "launch/without-cuda.txt").open("a") as file:
        file.write("another ; sys_platform == 'none'\n")


def test_what_changed_is_installed_over_what_runs_there_and_extras_add_up(checkout: Checkout) -> None:
    assert {word for word in checkout.installed() if word.startswith("--extra=")} == {"--extra=serve"}
    assert checkout.set_up() == (0, [])
    assert checkout.set_up("test") == (0, INSTALLED)
    assert {"--extra=serve", "--extra=test"} <= checkout.installed()
    assert checkout.set_up() == (0, [])
    change_requirements(checkout)
    assert checkout.set_up() == (0, INSTALLED)
    assert {"--extra=serve", "--extra=test"} <= checkout.installed()


@pytest.mark.parametrize("has_gpu", [False, True])
def test_requirements_of_gpus_are_left_out_where_there_is_none(has_gpu: bool, tmp_path: Path) -> None:
    checkout = Checkout(tmp_path / "one", tmp_path / "bin")
    program(checkout.tools / "nvidia-smi", f"exit {int(not has_gpu)}")
    program(checkout.tools / "g++", "cat >/dev/null")
    assert checkout.set_up()[0] == 0
    assert ("launch/without-cuda.txt" in checkout.installed()) is not has_gpu


def test_a_failed_installation_is_tried_again_over_what_runs_there(checkout: Checkout) -> None:
    change_requirements(checkout)
    uv = checkout.tools / "uv"
    works = uv.read_text()
    uv.write_text(works + "exit 1\n")
    assert checkout.set_up()[0] != 0
    uv.write_text(works)
    assert checkout.set_up() == (0, INSTALLED)


def test_an_index_out_of_reach_is_noticed_where_torch_is_installed_already(tmp_path: Path) -> None:
    """uv asks no index for what is installed, and answers from its cache for what it once asked."""
    unreachable = 'case "$*" in *--dry-run*--reinstall*--refresh*) exit 1 ;; esac'
    checkout = Checkout(tmp_path / "one", tmp_path / "bin", unreachable)
    assert checkout.set_up()[0] == 0
    assert not [word for word in checkout.installed() if "--torch-backend" in word]


def test_a_checkout_whose_environment_was_copied_or_linked_gets_its_own(
    checkout: Checkout, tmp_path: Path
) -> None:
    other = Checkout(tmp_path / "two", checkout.tools)
    shutil.copytree(checkout.venv, other.venv, symlinks=True)
    assert other.set_up() == (0, ["venv", *INSTALLED])
    shutil.rmtree(other.venv)
    other.venv.symlink_to(checkout.venv)
    assert other.set_up() == (0, ["venv", *INSTALLED])
    assert not other.venv.is_symlink()
    assert checkout.set_up() == (0, [])


def test_two_set_ups_at_once_are_one_after_the_other(tmp_path: Path) -> None:
    waits = f'[ "$1" != venv ] || {{ touch {tmp_path}/begun; read -r _ <{tmp_path}/go; }}'
    checkout = Checkout(tmp_path / "one", tmp_path / "bin", waits)
    os.mkfifo(tmp_path / "go")
    first = checkout.start()
    wait_until(lambda: (tmp_path / "begun").exists(), "the first has begun")
    second = checkout.start()
    try:
        assert second.stderr is not None
        assert "waiting for it" in second.stderr.readline()
    finally:
        (tmp_path / "go").write_text("\n")
        first.communicate(timeout=60)
        second.communicate(timeout=60)
    assert (first.returncode, second.returncode) == (0, 0)
    assert checkout.words() == ["venv", *INSTALLED]


def test_the_venv_module_is_asked_for_by_the_pythons_own_version(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path / "one", tmp_path / "bin")
    (checkout.tools / "uv").unlink()
    program(
        checkout.tools / "python3", f'[ "$2" = "import ensurepip" ] && exit 1; exec {sys.executable} "$@"'
    )
    program(checkout.tools / "id", "echo 1000")
    _, said = checkout.start().communicate(timeout=60)
    assert f"apt-get install python3.{sys.version_info.minor}-venv" in said
