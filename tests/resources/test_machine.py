"""Facts of this machine by a stand-in NVML and sysfs, and of a described one."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdserve.errors import ConfigError, StartupError
from pdserve.resources.machine import Gpu, has_nvidia_gpu, read_machine, this_machine
from tests.support.resources.nvml import StandInNvml


@pytest.mark.parametrize(
    ("names", "is_there"), [(["nvidia3"], True), (["nvidiactl", "nvidia-uvm"], False), ([], False)]
)
def test_a_gpu_of_any_number_is_one(tmp_path: Path, names: list[str], is_there: bool) -> None:
    for name in names:
        (tmp_path / name).touch()
    assert has_nvidia_gpu(tmp_path) is is_there


@pytest.fixture
def sys_dir(tmp_path: Path) -> Path:
    for address, node in (("0000:1a:00.0", "1\n"), ("0000:1b:00.0", "-1\n")):
        device = tmp_path / "bus/pci/devices" / address
        device.mkdir(parents=True)
        (device / "numa_node").write_text(node)
    return tmp_path


def test_gpus_come_with_their_numa_nodes(sys_dir: Path) -> None:
    nvml = StandInNvml(2)
    found = this_machine({}, nvml=nvml, sys=sys_dir)
    gpu = Gpu(index=0, memory_bytes=80 << 30, name="NVIDIA H100", numa_node=1)
    assert found.gpus[0] == gpu
    assert [one.numa_node for one in found.gpus] == [1, None]
    assert found.memory_bytes > 0
    assert nvml.open == 0


@pytest.mark.parametrize(
    ("visible", "indices"),
    [(None, [0, 1, 2]), ("2,0", [0, 2]), ("", []), ("-1", []), ("GPU-1000", [1]), ("GPU-2000-aa", [2])],
)
def test_gpus_that_the_environment_hides_are_not_there(
    sys_dir: Path, visible: str | None, indices: list[int]
) -> None:
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    found = this_machine(environment, nvml=StandInNvml(3), sys=sys_dir)
    assert [gpu.index for gpu in found.gpus] == indices


def test_a_gpu_that_is_hidden_by_a_wrong_word_is_said(sys_dir: Path) -> None:
    with pytest.raises(StartupError, match="5 is none of this machine's 3 GPUs"):
        this_machine({"CUDA_VISIBLE_DEVICES": "0,5"}, nvml=StandInNvml(3), sys=sys_dir)


def test_without_a_driver_there_are_no_gpus(sys_dir: Path) -> None:
    assert this_machine({}, nvml=StandInNvml(3, broken=["init"]), sys=sys_dir).gpus == ()


def test_a_driver_that_fails_is_said_and_closed(sys_dir: Path) -> None:
    nvml = StandInNvml(3, broken=["handle"])
    with pytest.raises(StartupError, match="nvidia-smi"):
        this_machine({}, nvml=nvml, sys=sys_dir)
    assert nvml.open == 0


def test_a_machine_is_described_in_toml(tmp_path: Path) -> None:
    path = tmp_path / "m.toml"
    path.write_text('memory = "2TB"\n[[gpus]]\nmemory = "80GiB"\ncount = 2\nnuma_nodes = [0, 1]\n')
    found = read_machine(path)
    assert (found.memory_bytes, found.shm_bytes) == (2 * 10**12, 10**12)
    assert [(gpu.index, gpu.numa_node) for gpu in found.gpus] == [(0, 0), (1, 1)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('memory = "2 lots"', "is not a size"),
        ("memory = 1\ngpu = []", "unknown key 'gpu' (did you mean 'gpus'?)"),
        ("memory = 1\n[[gpus]]\nmemory = 1\ncount = 2\nnuma_nodes = [0]", "a node for each of the 2 GPUs"),
    ],
)
def test_a_wrong_description_is_refused_with_its_place(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "m.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        read_machine(path)
    assert str(path) in str(error.value)
    assert said in str(error.value)
