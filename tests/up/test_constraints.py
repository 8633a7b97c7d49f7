"""launch/constraints.txt: what setup.sh installs, in which versions, from which files."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from importlib.metadata import requires
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.support.up.scripts import LAUNCH

pytestmark = pytest.mark.long

ROOT = LAUNCH.parent
CONSTRAINTS = LAUNCH / "constraints.txt"
OTHER_INDEX = {"torch", "torchvision", "torchaudio", "torchcodec", "triton"}
"""Without hashes: PyTorch's index has other files of these."""
RENEW = "run launch/lock.sh"


def name_of(requirement: Requirement) -> str:
    return re.sub(r"[-_.]+", "-", requirement.name).lower()


def pinned() -> dict[str, list[tuple[Requirement, int]]]:
    """Every pin of each package, and how many files it has hashes of."""
    found: dict[str, list[tuple[Requirement, int]]] = {}
    for block in re.split(r"\n(?=\w)", CONSTRAINTS.read_text().partition("\n")[2]):
        line, *hashes = block.rstrip().split(" \\\n")
        assert all(re.fullmatch(r" +--hash=sha256:[0-9a-f]{64}", each) for each in hashes), block
        requirement = Requirement(line)
        found.setdefault(name_of(requirement), []).append((requirement, len(hashes)))
    return found


def wanted() -> list[Requirement]:
    """What pyproject.toml names, less its own extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *chain(*project["optional-dependencies"].values())]
    return [one for one in map(Requirement, lines) if one.name != "pdserve"]


def without_cuda() -> list[Requirement]:
    lines = (LAUNCH / "without-cuda.txt").read_text().splitlines()
    return [Requirement(words) for line in lines if (words := line.partition("#")[0].strip())]


def test_every_package_has_one_version_and_the_hashes_of_its_files() -> None:
    for name, pins in pinned().items():
        for requirement, hashes in pins:
            assert re.fullmatch(r"==[^*,]+", str(requirement.specifier)), requirement
            assert (hashes == 0) == (name in OTHER_INDEX), requirement


def test_no_address_is_pinned() -> None:
    assert not re.search(r"://|^--|@ ", CONSTRAINTS.read_text(), re.MULTILINE)


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
def test_everything_that_is_wanted_is_pinned(python: str) -> None:
    environment = {"python_version": python, "python_full_version": f"{python}.0", "sys_platform": "linux"}
    environment |= {"platform_machine": "x86_64", "implementation_name": "cpython"}
    pins = pinned()
    for requirement in wanted():
        mine = [
            pin
            for pin, _ in pins.get(name_of(requirement), [])
            if pin.marker is None or pin.marker.evaluate(environment)
        ]
        assert len(mine) == 1, f"{requirement.name} is not pinned: {RENEW}"
        version = str(mine[0].specifier).removeprefix("==")
        assert requirement.specifier.contains(version, prereleases=True), f"{mine[0]}: {RENEW}"
    assert "uv" in pins


@pytest.mark.extended
def test_the_list_of_what_is_installed_names_every_package_and_no_place(tmp_path: Path) -> None:
    """As `launch/lock.sh --sbom` makes it."""
    [command] = re.findall(r"exec (cyclonedx-py .*)", (LAUNCH / "lock.sh").read_text())
    environment = {"PATH": str(Path(sys.executable).parent), "sbom": str(tmp_path / "sbom.json")}
    command = command.replace('"$venv/bin/python"', sys.executable)
    subprocess.run(["/bin/bash", "-c", command], cwd=ROOT, env=environment, check=True, timeout=120)
    text = (tmp_path / "sbom.json").read_text()
    made = json.loads(text)
    assert made["bomFormat"] == "CycloneDX"
    assert made["metadata"]["component"]["name"] == "pdserve"
    assert {"sglang", "torch", "uvloop", "msgspec"} <= {one["name"] for one in made["components"]}
    assert str(ROOT) not in text
    assert str(Path.home()) not in text


def test_what_is_left_out_without_a_gpu_is_what_sglang_or_torchs_cuda_build_asks_for() -> None:
    asked = {name_of(Requirement(line)) for line in requires("sglang") or ()}
    assert {name_of(one) for one in without_cuda()} <= asked | {"nvidia-cusolver"}
    assert not any(one.marker is None or one.marker.evaluate() for one in without_cuda())


def test_what_is_left_out_without_a_gpu_is_no_dependency_of_ours() -> None:
    assert {name_of(one) for one in without_cuda()}.isdisjoint(map(name_of, wanted()))


@pytest.mark.extended
@pytest.mark.parametrize("kind", ["gpu", "cpu"])
def test_the_pins_resolve(kind: str) -> None:
    """As setup.sh installs them: with a GPU all of SGLang's dependencies, without one the light set."""
    light = ["--overrides", str(LAUNCH / "without-cuda.txt")] if kind == "cpu" else []
    done = subprocess.run(
        [
            *(str(Path(sys.executable).with_name("uv")), "pip", "compile", "--quiet", "--universal"),
            *("--python-version", "3.11", "--no-annotate", "--no-header", *light),
            *("--all-extras", "pyproject.toml"),
            *("--constraints", str(CONSTRAINTS)),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, f"{done.stderr}\n{RENEW}"
    assert len(done.stdout.splitlines()) > 100
