"""A cluster on a machine with GPUs, and on one without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pdserve.errors import ConfigError
from pdserve.resources.machine import Machine, read_machine
from pdserve.up import cli
from pdserve.up.config import ClusterFile, ClusterSettings
from pdserve.up.launchers.process import LocalLauncher
from pdserve.up.plan import GPU_START_TIMEOUT_S, Plan, make_plan
from pdserve.up.planner import Planner, with_gpus
from tests.support.up.scripts import LAUNCH

MACHINES = Path(__file__).parents[1] / "resources" / "machines"
NO_GPU = Machine(memory_bytes=64 * 10**9, shm_bytes=32 * 10**9)


def eight_gpus() -> Machine:
    return read_machine(MACHINES / "h100x8.toml")


def planned(machine: Machine, extra: tuple[str, ...] = (), **tables: Any) -> Plan:
    plan = make_plan(
        ClusterFile(**tables),
        program=("x",),
        run_dir=Path("/run/x"),
        uid=0,
        ports=iter(range(7000, 7100)),
        extra_args=extra,
    )
    return with_gpus(plan, machine)[0]


def test_workers_get_gpus_of_their_own_and_time_to_start() -> None:
    prefill, decode, _ = planned(eight_gpus(), ("--tp-size", "4"), prefill=[{}], decode=[{}]).processes
    assert prefill.env == {"CUDA_VISIBLE_DEVICES": "0,1,2,3", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert decode.env == {"CUDA_VISIBLE_DEVICES": "4,5,6,7", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert prefill.start_timeout_s == GPU_START_TIMEOUT_S
    assert prefill.has_gpus


def test_without_a_gpu_the_plan_stays_as_it_is() -> None:
    worker, _ = planned(NO_GPU, agg=[{}]).processes
    assert (worker.env, worker.start_timeout_s, worker.has_gpus) == ({}, None, False)


def test_workers_on_the_cpu_take_no_gpu() -> None:
    worker, _ = planned(eight_gpus(), agg=[{"engine": {"device": "cpu"}}]).processes
    assert worker.env == {}


def test_what_the_file_says_stays() -> None:
    named = {"gpus": [5], "start_timeout_s": 9.0}
    by_env = {"env": {"CUDA_VISIBLE_DEVICES": "0", "A": "b"}}
    first, second, third, _ = planned(eight_gpus(), agg=[named, by_env, {}]).processes
    assert (first.env["CUDA_VISIBLE_DEVICES"], first.start_timeout_s) == ("5", 9.0)
    assert "gpus" not in first.config
    assert (second.env["CUDA_VISIBLE_DEVICES"], second.env["A"]) == ("0", "b")
    assert third.env["CUDA_VISIBLE_DEVICES"] == "1"


def test_a_start_time_out_of_the_cluster_holds_for_all() -> None:
    plan = planned(eight_gpus(), cluster=ClusterSettings(start_timeout_s=20.0), agg=[{}])
    assert plan.processes[0].start_timeout_s is None


@pytest.mark.parametrize(
    ("worker", "extra", "said"),
    [
        ({"gpus": [0]}, ("--tp", "2"), r"'agg\[0\].gpus' is 1, and its flags need 2"),
        ({"gpus": "0"}, (), r"'agg\[0\].gpus': Expected `int`"),
        ({}, ("--tp-size=16",), "agg0 16 = 16 GPUs are needed"),
        ({}, ("--tp-size", "many"), r"'agg\[0\]': --tensor-parallel-size must be a number"),
        ({"env": {"CUDA_VISIBLE_DEVICES": "GPU-1"}}, (), r"write gpus = \[\.\.\] instead"),
        ({"engine": {"device": "cpu"}, "gpus": [0]}, (), "it runs on the CPU"),
    ],
)
def test_what_does_not_fit_is_refused(worker: dict[str, Any], extra: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        planned(eight_gpus(), extra, agg=[worker])


def test_gpus_on_a_machine_without_one_are_refused() -> None:
    with pytest.raises(ConfigError, match="this machine has no GPU"):
        planned(NO_GPU, agg=[{"gpus": [0]}])


def test_a_dry_run_says_what_each_worker_gets_and_starts_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cli, "run_plan", lambda *_: pytest.fail("it was started"))
    words = [str(LAUNCH / "disagg.toml"), "--dry-run", "--machine", str(MACHINES / "h100x8.toml")]
    said = CliRunner().invoke(cli.app, [*words, "--run-dir", str(tmp_path / "run"), "--", "--tp-size", "4"])
    assert said.exit_code == 0, said.output
    assert "prefill0: GPUs 0, 1, 2, 3 (H100" in said.output
    assert "router: router on this host, at 127.0.0.1:8000" in said.output


def scaled_from_one(run_dir: Path) -> Planner:
    file = ClusterFile(cluster=ClusterSettings(run_dir=run_dir), pool=[{}], prefill=[{}], decode=[{}])
    made = Planner(
        file,
        LocalLauncher({}, ClusterSettings()),
        source="x",
        program=("x",),
        extra_args=("--tp-size", "2"),
        environ={},
        machine=eight_gpus(),
    )
    made.plan()
    return made


def test_scaled_a_new_worker_gets_free_gpus_and_the_others_keep_all_that_they_have(tmp_path: Path) -> None:
    made = scaled_from_one(tmp_path)
    first = {spec.name: spec for spec in made.scaled({}).processes}
    second = {spec.name: spec for spec in made.scaled({"decode": 2}).processes}
    for name in ("pool0", "prefill0", "decode0"):
        assert second[name] == first[name]
    gpus = [second[name].env["CUDA_VISIBLE_DEVICES"] for name in ("prefill0", "decode0", "decode1")]
    assert len({index for given in gpus for index in given.split(",")}) == 6
    urls = second["router"].config["decode"]
    assert urls[:1] == first["router"].config["decode"]
    assert len(set(urls)) == 2
    assert [spec.name for spec in made.scaled({"decode": 1}).processes] == list(first)


def test_scaled_beyond_the_gpus_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    made = scaled_from_one(tmp_path)
    with pytest.raises(ConfigError, match="GPUs are needed"):
        made.scaled({"decode": 9})
    assert len(made.scaled({}).processes) == 4
