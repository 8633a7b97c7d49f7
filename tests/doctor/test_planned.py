"""`pdserve doctor --plan`: what would be started where, without starting it."""

from __future__ import annotations

from pathlib import Path

import msgspec
from typer.testing import CliRunner

from pdserve.doctor.cli import app
from tests.support.capacity.models import MACHINES, make_model
from tests.support.up.scripts import LAUNCH


def doctor(*words: object) -> tuple[int, str]:
    said = CliRunner().invoke(app, [str(word) for word in words])
    return said.exit_code, said.output


def test_a_described_machine_is_planned_in_lines(tmp_path: Path) -> None:
    model = make_model(tmp_path, "qwen3-32b")
    machine = MACHINES / "h100x8.toml"
    where = ("--plan", LAUNCH / "disagg.toml", "--machine", machine, "--model", model)
    status, said = doctor(*where, "--", "--tp-size", "4")
    assert status == 0
    assert "decode0: GPUs 4, 5, 6, 7 (H100, NUMA node 1, near mlx5_2, mlx5_3)" in said
    assert "prefill0 host pool" in said
    status, said = doctor(*where, "--json", "--", "--tp-size", "16")
    found = msgspec.json.decode(said)
    assert (status, found["status"]) == (2, 2)
    assert "32 GPUs are needed" in found["findings"][0]["says"]


def test_a_container_without_shared_memory_is_told_the_flag(tmp_path: Path) -> None:
    model = make_model(tmp_path, "qwen3-32b")
    status, said = doctor(
        *("--plan", LAUNCH / "agg.toml", "--machine", MACHINES / "h100x8-docker.toml", "--model", model)
    )
    assert status == 2
    assert "--shm-size=" in said


def test_a_machine_without_a_gpu_keeps_the_files_sizes(tmp_path: Path) -> None:
    machine = tmp_path / "m.toml"
    machine.write_text('memory = "64GB"\n')
    status, said = doctor("--plan", LAUNCH / "agg.toml", "--machine", machine)
    assert status == 0
    assert "there is no GPU here" in said


def test_options_of_a_plan_need_one() -> None:
    said = CliRunner().invoke(app, ["--machine", "x.toml"])
    assert "--plan FILE" in str(said.exception)
