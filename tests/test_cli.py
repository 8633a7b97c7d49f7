"""The `pdserve` command as a person meets it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pdserve.cli import SUB_COMMANDS, load
from tests.support.command import pdserve_here


def pdserve(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pdserve", *words], capture_output=True, text=True, timeout=60, check=False
    )


def test_help_names_every_sub_command() -> None:
    shown = pdserve("--help")
    assert shown.returncode == 0
    assert all(f"\n  {name} " in shown.stdout for name in SUB_COMMANDS)


def test_help_imports_no_torch_and_no_sglang() -> None:
    code = (
        "import sys\nfrom pdserve.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "print([name for name in ('torch', 'sglang', 'numpy', 'fastapi') if name in sys.modules])"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert shown.stdout.splitlines()[-1] == "[]"


def test_the_router_imports_no_numpy() -> None:
    """It costs 12 MB in each of its processes."""
    code = (
        "import sys, pdserve.router.app.lifespan\n"
        "import pdserve.router.admin.app, pdserve.router.sharing.child\n"
        "print([name for name in ('torch', 'sglang', 'numpy') if name in sys.modules])"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert shown.stdout == "[]\n"


@pytest.mark.parametrize("name", SUB_COMMANDS)
def test_every_sub_command_has_help(name: str) -> None:
    shown = pdserve_here(name, "--help")
    assert shown.returncode == 0, shown.stderr
    assert f"Usage: pdserve {name} " in shown.stdout


def test_no_words_show_the_help() -> None:
    assert "Commands:" in pdserve_here().stdout


def test_version() -> None:
    assert pdserve_here("--version").stdout.startswith("pdserve 0.")


def test_an_unknown_sub_command_is_a_usage_error() -> None:
    shown = pdserve_here("rooter")
    assert shown.returncode == 2
    assert "No such command 'rooter'" in shown.stderr


def test_a_configuration_error_is_one_line_and_status_2() -> None:
    shown = pdserve_here("up", "no-such-file.toml")
    assert (shown.returncode, shown.stdout) == (2, "")
    assert shown.stderr == "pdserve up: error: no-such-file.toml: no such configuration file\n"


def test_every_sub_command_loads() -> None:
    for sub in SUB_COMMANDS.values():
        load(sub.target)
