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
  mkdir -p "$last/bin" && ln -s "$PYTHON" "$last/bin/python"
fi
{more}
"""


class Checkout:
    """A copy of what setup.sh reads, with `uv` replaced; `more`: further lines of bash for that."""

    def __init__(self, root: Path, tools: Path, more: str = "") -> None:
        self.root, self.tools, self.asked = root, tools, tools / "asked"
        self.venv = root / ".venv"
        (root / "launch").mkdir(parents=True)
        for name in ("setup.sh", "requirements-cpu.txt", "constraints.txt"):
            shutil.copy(LAUNCH / name, root / "launch")
        shutil.copy(LAUNCH.parent / "pyproject.toml", root)
        program(tools / "uv", UV.replace("{more}", more))
        (tools / "python3").unlink(missing_ok=True)
        program(tools / "python3", f'exec {sys.executable} "$@"')
        program(tools / "nvidia-smi", "exit 1")

    def start(self) -> subprocess.Popen[str]:
        path = f"{self.tools}:/usr/bin:/bin"
        variables = {"PATH": path, "ASKED": str(self.asked), "PYTHON": sys.executable}
        return subprocess.Popen(
            [str(self.root / "launch/setup.sh")],
            env=os.environ | variables,
            stderr=subprocess.PIPE,
            text=True,
        )

    def set_up(self) -> tuple[int, list[str]]:
        """Exit status, and what was asked of `uv`: `venv` where .venv was made anew."""
        self.asked.unlink(missing_ok=True)
        process = self.start()
        process.communicate(timeout=60)
        return process.returncode, self.words()

    def words(self) -> list[str]:
        asked = self.asked.read_text().splitlines() if self.asked.exists() else []
        return [line.split()[0] for line in asked if "--dry-run" not in line]


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    made = Checkout(tmp_path / "one", tmp_path / "bin")
    assert made.set_up() == (0, ["venv", "pip", "pip", "pip"])
    return made


def change_requirements(checkout: Checkout) -> None:
    with (checkout.root / "launch/requirements-cpu.txt").open("a") as file:
        file.write("another\n")


def test_nothing_is_done_where_nothing_has_changed(checkout: Checkout) -> None:
    assert checkout.set_up() == (0, [])


def test_a_changed_requirement_is_installed_over_what_runs_there(checkout: Checkout) -> None:
    change_requirements(checkout)
    assert checkout.set_up() == (0, ["pip", "pip", "pip"])
    assert checkout.set_up() == (0, [])


def test_a_failed_installation_is_tried_again_over_what_runs_there(checkout: Checkout) -> None:
    change_requirements(checkout)
    uv = checkout.tools / "uv"
    works = uv.read_text()
    uv.write_text(works + "exit 1\n")
    assert checkout.set_up()[0] != 0
    uv.write_text(works)
    assert checkout.set_up() == (0, ["pip", "pip", "pip"])


def test_an_index_out_of_reach_is_noticed_where_torch_is_installed_already(tmp_path: Path) -> None:
    """uv asks no index for what is installed, and answers from its cache for what it once asked."""
    unreachable = 'case "$*" in *--dry-run*--reinstall*--refresh*) exit 1 ;; esac'
    checkout = Checkout(tmp_path / "one", tmp_path / "bin", unreachable)
    assert checkout.set_up()[0] == 0
    installed = [line for line in checkout.asked.read_text().splitlines() if "--dry-run" not in line]
    assert not [line for line in installed if "--torch-backend" in line]


def test_a_copied_checkout_gets_an_environment_of_its_own(checkout: Checkout, tmp_path: Path) -> None:
    other = Checkout(tmp_path / "two", checkout.tools)
    shutil.copytree(checkout.venv, other.venv, symlinks=True)
    assert other.set_up() == (0, ["venv", "pip", "pip", "pip"])


def test_another_checkouts_environment_that_is_linked_here_is_left_alone(
    checkout: Checkout, tmp_path: Path
) -> None:
    other = Checkout(tmp_path / "two", checkout.tools)
    other.venv.symlink_to(checkout.venv)
    assert other.set_up() == (0, ["venv", "pip", "pip", "pip"])
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
    assert checkout.words() == ["venv", "pip", "pip", "pip"]


def test_what_lies_where_only_root_looks_is_found(checkout: Checkout) -> None:
    said = subprocess.run(
        ["bash", "-c", f'. {checkout.root}/launch/setup.sh; echo "$PATH"'],
        env={**os.environ, "PATH": f"{checkout.tools}:/usr/bin:/bin", "ASKED": "/dev/null", "PYTHON": "x"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert said.stdout.strip().endswith("/bin:/usr/sbin:/sbin")


def test_the_venv_module_is_asked_for_by_the_pythons_own_version(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path / "one", tmp_path / "bin")
    (checkout.tools / "uv").unlink()
    program(
        checkout.tools / "python3", f'[ "$2" = "import ensurepip" ] && exit 1; exec {sys.executable} "$@"'
    )
    program(checkout.tools / "id", "echo 1000")
    _, said = checkout.start().communicate(timeout=60)
    assert f"apt-get install python3.{sys.version_info.minor}-venv" in said
