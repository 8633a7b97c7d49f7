"""launch/constraints.txt: what setup.sh installs, in which versions, from which files."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import requires
from itertools import chain

import pytest
from packaging.requirements import Requirement

from tests.support.up.scripts import LAUNCH

pytestmark = pytest.mark.long

ROOT = LAUNCH.parent
CONSTRAINTS = LAUNCH / "constraints.txt"
OTHER_INDEX = {"torch", "torchvision", "torchaudio", "torchcodec", "triton"}
"""Without hashes: PyTorch's index has other files of these."""
RENEW = "CONTRIBUTING.md says how to write it anew"


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
    assert not re.search(r"://|^--|@ ", CONSTRAINTS.read_text(), re.MULTILINE), "an address is pinned"


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


def test_what_is_left_out_without_a_gpu_is_what_sglang_or_torchs_cuda_build_asks_for() -> None:
    asked = {name_of(Requirement(line)) for line in requires("sglang") or ()}
    assert {name_of(one) for one in without_cuda()} <= asked | {"nvidia-cusolver"}
    assert not any(one.marker is None or one.marker.evaluate() for one in without_cuda())
    assert {name_of(one) for one in without_cuda()}.isdisjoint(map(name_of, wanted())), "ours"
