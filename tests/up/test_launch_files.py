"""The launch scripts and the cluster files that they start."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from pdserve.errors import ConfigError
from pdserve.up.cli import SCHEMAS, check_tables
from pdserve.up.config import ClusterFile, read_cluster_file
from pdserve.up.hosts import Site
from pdserve.up.launchers.launcher import SshLauncher
from pdserve.up.plan import demands, make_plan
from tests.support.command import pdserve_here
from tests.support.up.cluster import wait_until
from tests.support.up.scripts import LAUNCH, program
from tests.support.up.slurm_commands import slurm_commands


@pytest.mark.parametrize(
    ("name", "processes"),
    [
        ("disagg", ["pool0", "prefill0", "decode0", "router"]),
        ("agg", ["pool0", "agg0", "router"]),
        ("elastic", ["pool0", "elastic0", "elastic1", "router"]),
        ("vllm", ["pool0", "lmcache", "prefill0", "decode0", "router"]),
        ("dynamo", ["pool0", "worker-0", "worker-1", "frontend"]),
    ],
)
def test_cluster_files_are_valid_for_every_process(name: str, processes: list[str]) -> None:
    path = LAUNCH / f"{name}.toml"
    plan = make_plan(
        read_cluster_file(path, {}, {}),
        program=("pdserve",),
        run_dir=Path("/run/x"),
        uid=0,
        ports=iter(range(20_000, 20_010)),
    )
    check_tables(plan, str(path), SCHEMAS)
    assert [spec.name for spec in plan.processes] == processes
    assert plan.router_url == "http://127.0.0.1:8000"


def test_the_file_for_several_hosts_is_valid_and_spreads_what_it_lists() -> None:
    path = LAUNCH / "hosts.toml"
    file = read_cluster_file(path, {}, {})
    hosts = SshLauncher({}, file.cluster).assign(demands(file))
    assert hosts == {
        "pool0": "a", "pool1": "b", "pool2": "c", "prefill0": "a", "decode0": "b", "decode1": "c",
        "router0": "a", "router1": "b",
    }  # fmt: skip
    ports, site = iter(range(20_000, 20_100)), Site(hosts, "n" * 20, "p" * 20, frozenset(hosts))
    plan = make_plan(file, program=("p",), run_dir=Path("/run/x"), uid=0, ports=ports, site=site)
    check_tables(plan, str(path), SCHEMAS)
    assert plan.router_url == "http://a:8000"


def test_a_mistyped_key_is_refused_by_file_table_and_key_before_anything_starts(tmp_path: Path) -> None:
    engine = {"model_path": "m"}
    file = ClusterFile(agg=[{"engine": engine}, {"engine": engine, "setle_s": 2}])
    ports = iter(range(9000, 9010))
    plan = make_plan(file, program=("x",), run_dir=tmp_path, uid=0, ports=ports)
    with pytest.raises(ConfigError, match=r"c.toml: \[agg\[1\]\]: unknown key 'setle_s'"):
        check_tables(plan, "c.toml", SCHEMAS)


def test_a_worker_on_several_hosts_is_for_kubernetes(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(
        f'[cluster]\nname = "c"\nrun_dir = "{tmp_path}/run"\n[[pool]]\n[[agg]]\nengine.model_path = "m"\n'
    )
    done = pdserve_here("up", str(file), "--", "--nnodes", "2")
    assert (done.returncode, "only Kubernetes runs a worker on several hosts" in done.stderr) == (2, True)


@pytest.mark.parametrize("script", ["serve.sh", "disagg.sh", "agg.sh", "test.sh", "docs.sh"])
def test_script_help_needs_no_set_up(script: str, tmp_path: Path) -> None:
    words = [str(LAUNCH / script), "--help"]
    shown = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True, cwd=tmp_path)
    assert f"launch/{script} " in shown.stdout or "launch/serve.sh NAME [" in shown.stdout
    assert shown.stderr == ""


class DemoScript:
    """launch/disagg.sh in a checkout of its own, set up already, with `pdserve` replaced by lines of bash."""

    def __init__(self, root: Path, program: str) -> None:
        self.root, self.asked = root, root / "asked"
        for directory in (root / "launch", root / ".venv/bin"):
            directory.mkdir(parents=True)
        for script in ("disagg.sh", "serve.sh"):
            shutil.copy(LAUNCH / script, root / "launch")
        say = "say() { printf 'setup: %s\\n' \"$*\" >&2; }"
        (root / "launch/setup.sh").write_text(f"root={root} venv={root}/.venv\n{say}\n")
        for name in ("pdserve", "python"):
            path = root / ".venv/bin" / name
            path.write_text(f'#!/bin/bash\nprintf "%s\\n" "$*" >>{self.asked}\n{program}\n')
            path.chmod(0o755)

    def run(self, *words: str, script: str = "disagg.sh") -> tuple[list[str], list[str]]:
        """What it asked of `pdserve`, with paths in the checkout, and what it said."""
        self.asked.unlink(missing_ok=True)
        done = subprocess.run(
            [str(self.root / "launch" / script), *words],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        return self.asked.read_text().replace(f"{self.root}/", "").splitlines(), done.stderr.splitlines()


UP = "up launch/disagg.toml --run-dir logs/disagg --model models/"


def test_a_script_downloads_the_demo_model_once_unless_another_model_or_file_is_named(tmp_path: Path) -> None:
    script = DemoScript(tmp_path, '[ "$1" = up ] || { mkdir -p "${@: -1}" && touch "${@: -1}/config.json"; }')
    assert script.run("--model", "m") == (["up launch/disagg.toml --run-dir logs/disagg --model m"], [])
    own = ["./mine.toml", "--port", "8001"]
    assert script.run(*own, script="serve.sh") == (["up ./mine.toml --port 8001"], [])
    asked, said = script.run("--port", "8001")
    assert asked == ["-m pdserve.engine.demo models/smollm2-135m", f"{UP}smollm2-135m --port 8001"]
    assert [line.split(",")[0] for line in said] == ["setup: making the demo model"]
    assert script.run() == ([f"{UP}smollm2-135m"], [])


def test_a_script_without_a_network_says_in_one_line_that_it_serves_a_random_model(tmp_path: Path) -> None:
    refused = "echo 'error: cannot download it' >&2; exit 1"
    script = DemoScript(
        tmp_path, f'if [ "$*" = "-m pdserve.engine.demo {tmp_path}/models/smollm2-135m" ]; then {refused}; fi'
    )
    asked, said = script.run()
    assert asked[1:] == ["-m tests.support.random_model small models/demo-small", f"{UP}demo-small"]
    assert said[1:] == [
        "setup: cannot download it; serving a model with random weights in its place, demo-small"
    ]


def test_a_job_of_slurm_that_is_taken_away_drains_and_is_requeued(tmp_path: Path) -> None:
    with slurm_commands(tmp_path) as variables:
        program(
            tmp_path / "pdserve",
            f"trap 'exit 3' TERM; echo \"$*\" >{tmp_path}/asked; while :; do sleep 0.05; done",
        )
        job = subprocess.Popen(
            ["bash", str(LAUNCH / "slurm.sbatch"), "cluster.toml", "--port", "8001"],
            env=os.environ | variables | {"PDSERVE": str(tmp_path / "pdserve")},
        )
        wait_until((tmp_path / "asked").exists, "the cluster has begun")
        job.send_signal(signal.SIGUSR2)
        assert job.wait(60) == 3
    assert (tmp_path / "asked").read_text() == "up cluster.toml --port 8001 --on slurm\n"
    assert (tmp_path / "requeued").read_text() == "7\n"
