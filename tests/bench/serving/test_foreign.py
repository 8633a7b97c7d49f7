"""Contenders of other engines: what is started for them, with the sizes that all have."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from benchmarks.serving import cluster
from benchmarks.serving.cluster import environments_of, launched
from benchmarks.serving.contenders import NAMES, Setting
from benchmarks.serving.foreign import DYNAMO, FOREIGN, GIB, VLLM, dynamo_argv, vllm_contender
from benchmarks.stores import BenchError
from pdserve.up.plan import Plan
from tests.support.bench.serving import checked_plan

SETTING = Setting(
    model_path="/m",
    directory="/run/b",
    device_tokens=640,
    kv_token_bytes=GIB // 640,
    arena_directory="/dev/shm/b",
    pool_capacity="3GiB",
    extra_args=("--seed", "7"),
)
PROCESSES = {
    "vllm": ["vllm0", "router"],
    "vllm-cpu": ["lmcache0", "vllm0", "router"],
    "vllm-disk": ["lmcache0", "vllm0", "router"],
    "vllm-pool": ["pool0", "lmcache0", "vllm0", "router"],
}


def plan_of(name: str, directory: Path) -> Plan:
    chosen = vllm_contender(name, SETTING, Path("/v/python"), 9000, 9001)
    assert (chosen.port, chosen.router_port) == (9001, 9000)
    return checked_plan(chosen, directory)


def argument(argv: Sequence[str], name: str) -> str:
    return argv[argv.index(name) + 1]


def test_no_name_means_two_contenders() -> None:
    assert not {*NAMES} & {*FOREIGN}
    assert {*FOREIGN} == {*DYNAMO, *VLLM}


@pytest.mark.parametrize("name", VLLM)
def test_a_cluster_of_vllm_is_valid_for_every_process(name: str, tmp_path: Path) -> None:
    plan = plan_of(name, tmp_path)
    assert [spec.name for spec in plan.processes] == PROCESSES[name]
    [worker] = [spec for spec in plan.processes if spec.role == "vllm"]
    assert argument(worker.argv, "--port") == "9001"
    assert argument(worker.argv, "--block-size") == "64"
    assert argument(worker.argv, "--num-gpu-blocks-override") == "11"  # 640 tokens, and the one not used
    assert worker.argv[-2:] == ("--seed", "7")
    assert worker.env["VLLM_API_KEY"] == ""  # whoever asks it directly has no token
    assert ("--kv-transfer-config" in worker.argv) == (name != "vllm")


@pytest.mark.parametrize("name", [name for name in VLLM if name != "vllm"])
def test_lmcache_has_the_memory_that_others_have_and_one_tier_below(name: str, tmp_path: Path) -> None:
    [server] = [spec for spec in plan_of(name, tmp_path).processes if spec.role == "lmcache"]
    # twice the device's cache, as SGLang's host memory; without a pool its memory too
    assert float(argument(server.argv, "--l1-size-gb")) == pytest.approx(2 + 3 * (name == "vllm-cpu"))
    below = [json.loads(server.argv[i + 1]) for i, word in enumerate(server.argv) if word == "--l2-adapter"]
    kinds = {"vllm-cpu": [], "vllm-disk": ["fs_native"], "vllm-pool": ["plugin"]}
    assert [one["type"] for one in below] == kinds[name]
    assert ("--eviction-trigger-watermark" in server.argv) == (name != "vllm-cpu")


@pytest.mark.parametrize("name", DYNAMO)
def test_workers_of_dynamo_have_the_sizes_of_all(name: str) -> None:
    argv = dynamo_argv(name, SETTING, Path("/c/launch/dynamo.sh"), 9000)
    assert argv[:2] == ["/c/launch/dynamo.sh", DYNAMO[name]]
    ours, theirs = argv[2 : argv.index("--")], argv[argv.index("--") + 1 :]
    for word, value in (
        ("--port", "9000"),
        ("--workers", "1"),
        ("--pool-capacity", "3GiB"),
        ("--run-dir", f"/run/b/{name}"),
        ("--arena-dir", f"/dev/shm/b/{name}"),
    ):
        assert argument(ours, word) == value
    for word, value in (
        ("--max-total-tokens", "640"),
        ("--page-size", "64"),
        ("--hicache-ratio", "2.0"),
        ("--num-reserved-decode-tokens", "64"),
    ):
        assert argument(theirs, word) == value
    assert theirs[-2:] == ["--seed", "7"]


@pytest.mark.parametrize(
    ("name", "says"),
    [("dynamo", "launch/dynamo.sh --set-up"), ("vllm-pool", "launch/vllm.sh --set-up")],
)
def test_what_is_not_set_up_is_said(
    name: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "CHECKOUT", tmp_path)
    setting = replace(SETTING, directory=str(tmp_path), arena_directory=str(tmp_path / "arena"))
    with pytest.raises(BenchError, match=says), launched(name, setting):
        pass


def test_versions_of_other_environments_are_kept_where_their_contenders_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in (
        ".venv-vllm/lib/python3.11/site-packages/lmcache-0.5.6",
        ".venv-dynamo/lib/python3.12/site-packages/ai_dynamo-1.6.1",
    ):
        there = tmp_path / f"{place}.dist-info"
        there.mkdir(parents=True)
        name, _, version = there.stem.partition("-")
        (there / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    monkeypatch.setattr(cluster, "CHECKOUT", tmp_path)
    assert environments_of(["agg"]) == {}
    assert environments_of(["agg", "vllm-pool"]) == {".venv-vllm": {"lmcache": "0.5.6"}}
    assert environments_of(["dynamo-disagg"]) == {".venv-dynamo": {"ai-dynamo": "1.6.1"}}
