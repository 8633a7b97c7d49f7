"""The launch scripts and the cluster files that they start."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Annotated

import msgspec
import pytest
import typer
from msgspec import Meta

from pdserve.bench.cli import app as bench_app
from pdserve.errors import ConfigError
from pdserve.up.cli import SCHEMAS, check_tables
from pdserve.up.config import ClusterFile, read_cluster_file
from pdserve.up.plan import make_plan

LAUNCH = Path(__file__).parent.parent.parent / "launch"


@pytest.mark.parametrize(
    ("name", "processes"),
    [("disagg", ["pool0", "prefill0", "decode0", "router"]), ("agg", ["pool0", "agg0", "router"])],
)
def test_cluster_files_are_valid_for_every_process(name: str, processes: list[str]) -> None:
    path = LAUNCH / f"{name}.toml"
    plan = make_plan(
        read_cluster_file(path, {}, {}),
        program=("pdserve",),
        run_dir=Path("/run/x"),
        ports=iter(range(20_000, 20_010)),
    )
    check_tables(plan, str(path), SCHEMAS)
    assert [spec.name for spec in plan.processes] == processes
    assert plan.router_url == "http://127.0.0.1:8000"
    assert plan.processes[-1].config["admin"]["pool"] == ["unix:/run/x/pool0.sock"]


class Worker(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    engine: Annotated[dict[str, object], Meta(description="SGLang.")]
    pool: Annotated[dict[str, object], Meta(description="Pool.")]
    settle_s: Annotated[float, Meta(description="Time.")] = 1.0
    stop_grace_s: Annotated[float, Meta(description="Time.")] = 1.0


def test_a_mistyped_key_is_refused_by_file_table_and_key_before_anything_starts() -> None:
    plan = make_plan(
        ClusterFile(agg=[{}, {"setle_s": 2}]),
        program=("x",),
        run_dir=Path("/r"),
        ports=iter(range(9000, 9010)),
    )
    with pytest.raises(ConfigError) as caught:
        check_tables(plan, "c.toml", {"agg": f"{__name__}:Worker"})
    assert str(caught.value) == "c.toml: [agg[1]]: unknown key 'setle_s' (did you mean 'settle_s'?)"


@pytest.mark.parametrize("script", ["disagg.sh", "agg.sh", "test.sh", "bench.sh"])
def test_script_help_needs_no_set_up(script: str, tmp_path: Path) -> None:
    shown = subprocess.run(
        [str(LAUNCH / script), "--help"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        cwd=tmp_path,
    )
    assert f"launch/{script} [" in shown.stdout
    assert shown.stderr == ""


def test_scripts_are_valid_bash() -> None:
    for script in LAUNCH.glob("*.sh"):
        subprocess.run(["bash", "-n", str(script)], check=True)


def test_bench_runs_commands_that_exist_and_keeps_their_lines(tmp_path: Path) -> None:
    launch, program = tmp_path / "launch", tmp_path / ".venv/bin/pdserve"
    for directory in (launch, program.parent, tmp_path / "models/demo-small"):
        directory.mkdir(parents=True)
    (tmp_path / "models/demo-small/config.json").touch()
    shutil.copy(LAUNCH / "bench.sh", launch)
    (launch / "setup.sh").write_text(f"root={tmp_path} venv={tmp_path}/.venv\n")
    asked = tmp_path / "asked"
    program.write_text(f'#!/bin/bash\nprintf "%s\\n" "$*" >>{asked}\necho "$2"\n')
    program.chmod(0o755)
    subprocess.run([str(launch / "bench.sh")], check=True, timeout=120, capture_output=True)
    kept = sorted((tmp_path / "pdserve/bench/results").glob("*.jsonl"))
    assert [path.name.rpartition("-20")[0] for path in kept] == [
        *("compare-documents", "compare-no-reuse", "compare-turns", "sweep", "weights")
    ]
    assert [path.read_text() for path in kept] == [
        "compare\n",
        "compare\n",
        "compare\n",
        "sweep\n",
        "weights\n",
    ]
    commands = typer.main.get_command(bench_app).commands  # type: ignore[attr-defined]
    for line in asked.read_text().splitlines():
        bench, name, *words = line.split()
        assert bench == "bench"
        commands[name].make_context(name, words)  # raises for an option or value that it does not know
        assert "/" not in line.replace("models/demo-small", "").replace("logs/bench/", "")
