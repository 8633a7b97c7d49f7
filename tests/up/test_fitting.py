"""A cluster file on a machine with GPUs, and on one without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from typer.testing import CliRunner

from pdserve.capacity.facts import Machine
from pdserve.capacity.gather import read_machine, read_model, this_machine
from pdserve.errors import ConfigError
from pdserve.up import cli
from pdserve.up.config import ClusterFile, ClusterSettings, read_cluster_file
from pdserve.up.fitting import fitted
from pdserve.up.places.local import LocalPlace
from pdserve.up.plan import Plan, make_plan
from pdserve.up.scale import planner
from tests.support.capacity.models import MACHINES, make_model
from tests.support.capacity.nvml import StandInNvml
from tests.support.up.scripts import LAUNCH

NO_GPU = Machine(memory_bytes=64 * 10**9, shm_bytes=32 * 10**9)


def eight_gpus() -> Machine:
    return read_machine(MACHINES / "h100x8.toml")


def planned(file: ClusterFile, machine: Machine, extra: tuple[str, ...] = ()) -> Plan:
    filled, _ = fitted(file, extra, machine, read_model)
    return make_plan(
        filled,
        program=("x",),
        run_dir=Path("/run/x"),
        uid=0,
        ports=iter(range(7000, 7100)),
        extra_args=extra,
    )


def file_of(model: Path, **tables: Any) -> ClusterFile:
    return ClusterFile(**{"worker": {"engine": {"model_path": str(model)}}, **tables})


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path, "qwen3-32b")


def test_the_launch_file_gets_gpus_memory_and_time_of_eight_gpus(model: Path) -> None:
    file = read_cluster_file(LAUNCH / "disagg.toml", {"worker.engine.model_path": str(model)}, {})
    plan = planned(file, eight_gpus(), ("--tp-size", "4"))
    pool, prefill, decode, _ = plan.processes
    assert prefill.env == {"CUDA_VISIBLE_DEVICES": "0,1,2,3", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert decode.env == {"CUDA_VISIBLE_DEVICES": "4,5,6,7", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert prefill.config["engine"]["hicache_size_gb"] == decode.config["engine"]["hicache_size_gb"] > 50
    assert prefill.config["engine"]["extra_args"] == ["--tp-size", "4"]
    assert pool.config["capacity_bytes"] > 500 * 10**9
    assert prefill.start_timeout_s is not None
    assert prefill.start_timeout_s > 300
    cli.check_tables(plan, "x", cli.SCHEMAS)


def test_without_a_gpu_the_file_stays_as_it_is(tmp_path: Path) -> None:
    file = file_of(tmp_path / "no model is read", pool=[{"capacity_bytes": "auto"}], agg=[{}])
    assert fitted(file, (), NO_GPU, read_model) == (file, None)
    pool, worker, _ = planned(file, NO_GPU).processes
    assert pool.config["capacity_bytes"] == "auto", "the node decides when it starts"
    assert (worker.env, worker.start_timeout_s) == ({}, None)


def test_workers_on_the_cpu_take_no_gpu(tmp_path: Path) -> None:
    file = file_of(tmp_path, agg=[{"engine": {"device": "cpu"}}])
    assert fitted(file, (), eight_gpus(), read_model) == (file, None)


def test_what_the_file_says_stays(model: Path) -> None:
    own = {"engine": {"hicache_size_gb": 7, "page_size": 32}, "gpus": [5], "start_timeout_s": 9.0}
    file = file_of(model, pool=[{"capacity_bytes": "3GiB"}], agg=[own, {"env": {"A": "b"}}])
    pool, named, other, _ = planned(file, eight_gpus()).processes
    assert pool.config["capacity_bytes"] == 3 << 30
    assert (named.config["engine"]["hicache_size_gb"], named.config["engine"]["page_size"]) == (7, 32)
    assert named.start_timeout_s == 9.0
    assert named.env["CUDA_VISIBLE_DEVICES"] == "5"
    assert "gpus" not in named.config
    assert other.env["A"] == "b"
    assert other.env["CUDA_VISIBLE_DEVICES"] != "5"


def test_a_start_time_out_of_the_cluster_holds_for_all(model: Path) -> None:
    file = file_of(model, cluster=ClusterSettings(start_timeout_s=20.0), agg=[{}])
    assert planned(file, eight_gpus()).processes[0].start_timeout_s is None


@pytest.mark.parametrize(
    ("worker", "extra", "said"),
    [
        ({"gpus": [0]}, ("--tp", "2"), r"agg0: gpus = \[0\] must be 2 different GPUs"),
        ({"gpus": "0"}, (), r"'agg\[0\]': Expected `int \| array \| null`, got `str` - at `\$.gpus`"),
        ({}, ("--tp-size=16",), "agg0 16 = 16 GPUs are needed"),
        ({}, ("--tp-size", "many"), "'agg.0.': Expected `int`"),
        ({}, ("--base-gpu-id", "4"), r"--base-gpu-id: .* write gpus = \[\.\.\] instead"),
        ({"env": {"CUDA_VISIBLE_DEVICES": "GPU-1"}}, (), r"write gpus = \[\.\.\] instead"),
        ({"engine": {"device": "cpu"}, "gpus": [0]}, (), "it runs on the CPU"),
    ],
)
def test_what_does_not_fit_is_refused(
    model: Path, worker: dict[str, Any], extra: tuple[str, ...], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        fitted(file_of(model, agg=[worker]), extra, eight_gpus(), read_model)


def test_gpus_on_a_machine_without_one_are_refused(model: Path) -> None:
    with pytest.raises(ConfigError, match="this machine has no GPU"):
        fitted(file_of(model, agg=[{"gpus": [0]}]), (), NO_GPU, read_model)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """Plans that `pdserve up` would run, on a machine whose NVML shows eight GPUs."""
    plans: list[Plan] = []
    monkeypatch.setattr(cli, "run_plan", lambda plan, place, scaled: plans.append(plan) or 0)
    stand_in = StandInNvml(8)

    def machine(environment: Any) -> Machine:
        gpus = this_machine(environment, nvml=stand_in).gpus
        return Machine(memory_bytes=2 * 10**12, shm_bytes=10**12, gpus=gpus)

    monkeypatch.setattr(planner, "this_machine", machine)
    return plans


def test_up_says_what_each_worker_gets_and_starts_so(started: list[Plan], model: Path) -> None:
    words = [str(LAUNCH / "disagg.toml"), "--model", str(model), "--", "--tp-size", "4"]
    said = CliRunner().invoke(cli.app, words)
    assert said.exit_code == 0, said.output
    assert "prefill0: GPUs 0, 1, 2, 3 (NVIDIA H100" in said.output
    assert "pool0 arena" in said.output
    assert started[0].processes[2].env["CUDA_VISIBLE_DEVICES"] == "4,5,6,7"


def test_up_starts_nothing_that_cannot_work(started: list[Plan], tmp_path: Path) -> None:
    model = make_model(tmp_path, "qwen3-next-80b-a3b")
    said = CliRunner().invoke(cli.app, [str(LAUNCH / "agg.toml"), "--model", str(model)])
    assert "set --tp-size 4" in str(said.exception)
    assert started == []


def scaled_from_one(model: Path, monkeypatch: pytest.MonkeyPatch, **pool: Any) -> planner.Planner:
    monkeypatch.setattr(planner, "this_machine", lambda environ: eight_gpus())
    file = file_of(model, pool=[pool], prefill=[{}], decode=[{"engine": {"hicache_size_gb": 20}}])
    file = replace(file, cluster=ClusterSettings(run_dir=model.parent / "run"))
    made = planner.Planner(
        file, LocalPlace({}), source="x", program=("x",), extra_args=("--tp-size", "2"), environ={}
    )
    made.plan()
    return made


def test_scaled_a_new_worker_gets_free_gpus_and_the_others_keep_all_that_they_have(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = scaled_from_one(model, monkeypatch, capacity_bytes="100GiB")
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


def test_scaled_beyond_the_gpus_is_refused_and_changes_nothing(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = scaled_from_one(model, monkeypatch, capacity_bytes="100GiB")
    with pytest.raises(ConfigError, match="GPUs are needed"):
        made.scaled({"decode": 9})
    assert len(made.scaled({}).processes) == 4


def test_a_draft_model_takes_memory_and_time(model: Path, tmp_path: Path) -> None:
    draft = make_model(tmp_path, "qwen3-0.6b")
    flags = ("--tp-size", "4", "--speculative-algorithm", "STANDALONE")
    drafted = (*flags, "--speculative-draft-model-path", str(draft))
    file = file_of(model, agg=[{}], pool=[{}])
    _, plain = fitted(file, flags[:2], eight_gpus(), read_model)
    _, fit = fitted(file, drafted, eight_gpus(), read_model)
    assert plain is not None
    assert fit is not None
    [one], [other] = plain.workers, fit.workers
    assert (one.draft, other.draft) == ("", "qwen3-0.6b")
    assert other.draft_page_bytes > 0
    assert other.device_tokens < one.device_tokens
    assert other.start_timeout_s > one.start_timeout_s
    with pytest.raises(ConfigError, match="no-such-draft"):
        fitted(file, (*flags, "--speculative-draft-model-path", "/no-such-draft"), eight_gpus(), read_model)
