"""A cluster on a machine with GPUs, and on one without: what is planned. Agents give the GPUs out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pdserve.errors import ConfigError
from pdserve.resources.machine import Machine, read_machine
from pdserve.up import cli
from pdserve.up.config import ClusterFile, ClusterSettings
from pdserve.up.launchers.launcher import Launcher
from pdserve.up.plan import GPU_START_TIMEOUT_S
from pdserve.up.planner import Planner
from pdserve.up.spec import ProcessSpec
from tests.support.up.scripts import LAUNCH

MACHINES = Path(__file__).parents[1] / "resources" / "machines"
NO_GPU = Machine(memory_bytes=64 * 10**9, shm_bytes=32 * 10**9)


def eight_gpus() -> Machine:
    return read_machine(MACHINES / "h100x8.toml")


class Planned:
    """A cluster file on a machine; what its workers are planned to get."""

    def __init__(self, run_dir: Path, machine: Machine, *extra: str, **tables: Any) -> None:
        file = ClusterFile(**{"cluster": ClusterSettings(run_dir=run_dir)} | tables)
        launcher = Launcher({}, file.cluster)
        self.planner = Planner(
            file, launcher, source="x", program=("x",), extra_args=extra, environ={}, machine=machine
        )
        plan = self.planner.plan()
        self.specs: dict[str, ProcessSpec] = {spec.name: spec for spec in plan.processes}
        self.gpus = self.planner.gpus(plan)


def test_workers_have_time_to_start_and_gpus_enough(tmp_path: Path) -> None:
    planned = Planned(tmp_path, eight_gpus(), "--tp-size", "4", prefill=[{}], decode=[{}])
    assert planned.gpus == {"prefill0": (0, 1, 2, 3), "decode0": (4, 5, 6, 7)}
    worker = planned.specs["prefill0"]
    assert (worker.gpu_count, worker.has_gpus, worker.start_timeout_s) == (4, True, GPU_START_TIMEOUT_S)
    cluster = ClusterSettings(run_dir=tmp_path, start_timeout_s=20.0)
    assert Planned(tmp_path, eight_gpus(), cluster=cluster, agg=[{}]).specs["agg0"].start_timeout_s is None


@pytest.mark.parametrize(("machine", "worker"), [(NO_GPU, {}), (eight_gpus(), {"engine": {"device": "cpu"}})])
def test_workers_on_the_cpu_are_planned_without(
    tmp_path: Path, machine: Machine, worker: dict[str, Any]
) -> None:
    planned = Planned(tmp_path, machine, agg=[worker])
    spec = planned.specs["agg0"]
    assert (planned.gpus, spec.start_timeout_s, spec.has_gpus) == ({}, None, False)


def test_gpus_that_tables_name_are_theirs_and_no_others(tmp_path: Path) -> None:
    named = {"gpus": [5], "start_timeout_s": 9.0}
    by_env = {"env": {"CUDA_VISIBLE_DEVICES": "0", "A": "b"}}
    planned = Planned(tmp_path, eight_gpus(), agg=[named, by_env, {}])
    assert planned.gpus == {"agg0": (5,), "agg1": (0,), "agg2": (1,)}
    assert [spec.gpus_of_others for spec in planned.specs.values()] == [(0,), (5,), (5, 0), ()]
    first, second, *_ = planned.specs.values()
    assert (first.start_timeout_s, second.env["A"], "gpus" in first.config) == (9.0, "b", False)


@pytest.mark.parametrize(
    ("worker", "extra", "said"),
    [
        ({"gpus": [0]}, ("--tp", "2"), r"'agg\[0\].gpus' is 1, and its flags need 2"),
        ({}, ("--tp-size=16",), "agg0: 16 GPUs are needed"),
        ({"env": {"CUDA_VISIBLE_DEVICES": "9"}}, (), "GPU 9 of its gpus is not here"),
        ({"engine": {"device": "cpu"}, "gpus": [0]}, (), "it runs on the CPU"),
    ],
)
def test_what_does_not_fit_is_refused(
    tmp_path: Path, worker: dict[str, Any], extra: tuple[str, ...], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        Planned(tmp_path, eight_gpus(), *extra, agg=[worker])
    with pytest.raises(ConfigError, match="this machine has no GPU"):
        Planned(tmp_path, NO_GPU, agg=[{"gpus": [0]}])


def test_a_dry_run_says_what_each_worker_gets_and_starts_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cli, "run_plan", lambda *_: pytest.fail("it was started"))
    words = [str(LAUNCH / "disagg.toml"), "--dry-run", "--machine", str(MACHINES / "h100x8.toml")]
    said = CliRunner().invoke(cli.app, [*words, "--run-dir", str(tmp_path / "run"), "--", "--tp-size", "4"])
    assert said.exit_code == 0, said.output
    assert "prefill0: GPUs 0, 1, 2, 3 (H100" in said.output
    assert "router: router on this host, at 127.0.0.1:8000" in said.output


def test_scaled_the_others_keep_all_that_they_have_until_there_are_too_few_gpus(tmp_path: Path) -> None:
    planned = Planned(tmp_path, eight_gpus(), "--tp-size", "2", pool=[{}], prefill=[{}], decode=[{}])
    made, first = planned.planner, planned.specs
    second = {spec.name: spec for spec in made.scaled({"decode": 2}).processes}
    for name in ("pool0", "prefill0", "decode0"):
        assert second[name] == first[name]
    urls = second["router"].config["decode"]
    assert urls[:1] == first["router"].config["decode"]
    assert len(set(urls)) == 2
    assert [spec.name for spec in made.scaled({"decode": 1}).processes] == list(first)
    with pytest.raises(ConfigError, match="GPUs are needed"):
        made.scaled({"decode": 9})
    assert len(made.scaled({}).processes) == 4
