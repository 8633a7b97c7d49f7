"""The launch scripts and the cluster files that they start."""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Annotated

import msgspec
import pytest
import typer
from msgspec import Meta

from benchmarks.cli import app as bench_app
from benchmarks.commands.load_options import loads_of
from docs.generate.benchmarks.results import kind_of
from pdserve.errors import ConfigError
from pdserve.up.cli import SCHEMAS, check_tables
from pdserve.up.config import ClusterFile, read_cluster_file
from pdserve.up.places.hosts import HostsPlace
from pdserve.up.plan import demands, make_plan
from pdserve.up.site import Site
from tests.support.command import pdserve_here
from tests.support.up.scripts import LAUNCH, program


@pytest.mark.parametrize(
    ("name", "processes"),
    [
        ("disagg", ["pool0", "prefill0", "decode0", "router"]),
        ("agg", ["pool0", "agg0", "router"]),
        ("elastic", ["pool0", "elastic0", "elastic1", "router"]),
        ("vllm", ["pool0", "lmcache0", "vllm0", "vllm1", "router"]),
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
    assert plan.processes[-1].config["admin"]["pool"] == ["unix:/run/x/pool0.sock"]


def test_the_file_for_several_hosts_is_valid_and_spreads_what_it_lists() -> None:
    path = LAUNCH / "hosts.toml"
    file = read_cluster_file(path, {}, {})
    place = HostsPlace({})
    place.submit([], file.cluster)
    hosts = place.assign(demands(file))
    assert hosts == {
        "pool0": "a", "pool1": "b", "pool2": "c", "prefill0": "a", "decode0": "b", "decode1": "c",
        "router0": "a", "router1": "b",
    }  # fmt: skip
    ports, site = iter(range(20_000, 20_100)), Site(hosts, "n" * 20, "p" * 20, frozenset(hosts))
    plan = make_plan(file, program=("p",), run_dir=Path("/run/x"), uid=0, ports=ports, site=site)
    check_tables(plan, str(path), SCHEMAS)
    assert plan.router_url == "http://a:8000"


def test_the_script_for_several_hosts_hands_over_its_remote_shell(tmp_path: Path) -> None:
    for directory in ("launch", "venv/bin"):
        (tmp_path / directory).mkdir(parents=True)
    for script in ("hosts.sh", "up.sh"):
        shutil.copy(LAUNCH / script, tmp_path / "launch")
    (tmp_path / "launch/setup.sh").write_text(f"root={tmp_path} venv={tmp_path}/venv\n")
    program(tmp_path / "venv/bin/pdserve", 'echo "$PDSERVE_REMOTE_SHELL $*"')
    words = ["--hosts", "a,b", "--remote-shell", "my ssh", "--model", "/m", "--", "--tp-size", "2"]
    said = subprocess.run(
        [tmp_path / "launch/hosts.sh", *words], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    assert said == (
        f"my ssh up {tmp_path}/launch/hosts.toml --run-dir {tmp_path}/logs/hosts --hosts a,b --model /m "
        "--on hosts -- --tp-size 2\n"
    )


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
        uid=0,
        ports=iter(range(9000, 9010)),
    )
    with pytest.raises(ConfigError) as caught:
        check_tables(plan, "c.toml", {"agg": f"{__name__}:Worker"})
    assert str(caught.value) == "c.toml: [agg[1]]: unknown key 'setle_s' (did you mean 'settle_s'?)"


def test_a_worker_on_several_hosts_is_for_kubernetes(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(
        f'[cluster]\nname = "c"\nrun_dir = "{tmp_path}/run"\n[[pool]]\n[[agg]]\nengine.model_path = "m"\n'
    )
    done = pdserve_here("up", str(file), "--", "--nnodes", "2")
    assert (done.returncode, "only Kubernetes runs a worker on several hosts" in done.stderr) == (2, True)


@pytest.mark.parametrize(
    "script",
    ["disagg.sh", "agg.sh", "hosts.sh", "vllm.sh", "dynamo.sh", "test.sh", "bench.sh", "docs.sh", "lock.sh"],
)
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


class DemoScript:
    """launch/disagg.sh in a checkout of its own, set up already, with `pdserve` replaced by lines of bash."""

    def __init__(self, root: Path, program: str) -> None:
        self.root, self.asked = root, root / "asked"
        for directory in (root / "launch", root / ".venv/bin"):
            directory.mkdir(parents=True)
        for script in ("disagg.sh", "up.sh"):
            shutil.copy(LAUNCH / script, root / "launch")
        say = "say() { printf 'setup: %s\\n' \"$*\" >&2; }"
        (root / "launch/setup.sh").write_text(f"root={root} venv={root}/.venv\n{say}\n")
        path = root / ".venv/bin/pdserve"
        path.write_text(f'#!/bin/bash\nprintf "%s\\n" "$*" >>{self.asked}\n{program}\n')
        path.chmod(0o755)

    def run(self, *words: str) -> tuple[list[str], list[str]]:
        """What it asked of `pdserve`, with paths in the checkout, and what it said."""
        done = subprocess.run(
            [str(self.root / "launch/disagg.sh"), *words],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        return self.asked.read_text().replace(f"{self.root}/", "").splitlines(), done.stderr.splitlines()


UP = "up launch/disagg.toml --run-dir logs/disagg --model models/"


def test_a_script_downloads_the_demo_model_once(tmp_path: Path) -> None:
    script = DemoScript(tmp_path, '[ "$1" = up ] || { mkdir -p "${@: -1}" && touch "${@: -1}/config.json"; }')
    asked, said = script.run("--port", "8001")
    assert asked == ["model demo --out models/smollm2-135m", f"{UP}smollm2-135m --port 8001"]
    assert [line.split(",")[0] for line in said] == ["setup: making the demo model"]
    asked, said = script.run()
    assert (asked[2:], said) == ([f"{UP}smollm2-135m"], [])


def test_a_script_without_a_network_says_in_one_line_that_it_serves_a_random_model(tmp_path: Path) -> None:
    refused = "echo 'pdserve model: error: cannot download it' >&2; exit 1"
    script = DemoScript(
        tmp_path, f'if [ "$*" = "model demo --out {tmp_path}/models/smollm2-135m" ]; then {refused}; fi'
    )
    asked, said = script.run()
    assert asked[1:] == ["model demo --size small --out models/demo-small", f"{UP}demo-small"]
    assert said[1:] == [
        "setup: cannot download it; serving a model with random weights in its place, demo-small"
    ]


def test_a_script_with_another_model_makes_none(tmp_path: Path) -> None:
    asked, said = DemoScript(tmp_path, "").run("--model", "m")
    assert (asked, said) == (["up launch/disagg.toml --run-dir logs/disagg --model m"], [])


def test_scripts_are_valid_bash() -> None:
    for script in LAUNCH.glob("*.sh"):
        subprocess.run(["bash", "-n", str(script)], check=True)


NAMES = ("compare-large", "compare-small", "overlap", "sweep", "weights")


class BenchScript:
    """launch/bench.sh in a checkout of its own, with `pdserve` replaced by `program`, a few lines of bash."""

    def __init__(self, root: Path, program: str) -> None:
        self.root, self.asked = root, root / "asked"
        self.results = root / "benchmarks/results"
        for directory in (root / "launch", root / ".venv/bin", root / "models/demo-small"):
            directory.mkdir(parents=True)
        (root / "models/demo-small/config.json").touch()
        shutil.copy(LAUNCH / "bench.sh", root / "launch")
        (root / "launch/setup.sh").write_text(f"root={root} venv={root}/.venv\n")
        path = root / ".venv/bin/pdserve"
        path.write_text(f'#!/bin/bash\nprintf "%s\\n" "$*" >>{self.asked}\n{program}\n')
        path.chmod(0o755)
        for words in (("init", "-q"), ("add", "launch"), ("commit", "-qm", "x")):
            user = ("-c", "user.name=x", "-c", "user.email=x")
            subprocess.run(["git", "-C", str(root), *user, *words], check=True)
        self.commit = subprocess.run(
            ["git", "-C", str(root), "rev-parse", "--short", "HEAD"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()

    def start(self, *words: str) -> subprocess.Popen[str]:
        """With SIGINT as a terminal's shell leaves it: a job in the background of a script has it ignored,
        and bash cannot trap what was ignored when it began.
        """
        script = ["env", "--default-signal=INT", str(self.root / "launch/bench.sh"), *words]
        return subprocess.Popen(script, stderr=subprocess.PIPE, text=True)

    def run(self, *words: str) -> tuple[int, str, list[str]]:
        """Exit status, what it said, and what was asked of `pdserve`."""
        self.asked.unlink(missing_ok=True)
        process = self.start(*words)
        said = process.communicate(timeout=120)[1]
        asked = self.asked.read_text().splitlines() if self.asked.exists() else []
        return process.returncode, said, asked

    def kept(self) -> list[str]:
        return [kind_of(path.name) for path in sorted(self.results.glob("*.jsonl"))]


def test_the_kind_of_a_run_is_its_name_before_the_date_whatever_the_day() -> None:
    assert [kind_of(f"weights-load-2026-12-{day}.jsonl") for day in ("19", "20")] == ["weights-load"] * 2


MEASURES = 'printf \'{"commit": "%s"}\\n%s\\n\' "$(git rev-parse --short HEAD)" "$2"'


def test_bench_runs_commands_that_exist_and_keeps_their_lines(tmp_path: Path) -> None:
    script = BenchScript(tmp_path, MEASURES)
    status, _, asked = script.run()
    assert status == 0
    assert script.kept() == list(NAMES)
    lines = [path.read_text().splitlines()[1] for path in sorted(script.results.glob("*.jsonl"))]
    assert lines == ["compare", "compare", "weights", "sweep", "weights"]
    commands = typer.main.get_command(bench_app).commands  # type: ignore[attr-defined]
    for line in asked:
        bench, name, *words = line.split()
        assert bench == "bench"
        context = commands[name].make_context(name, words)  # raises for an option or value it does not know
        chunks = ["--chunked-prefill-size", "256"] if "--pull-step" in line else []
        assert context.params["extra"] == ["--dtype", "float32", *chunks]
        if name == "compare":
            assert len(loads_of(context.params["load"], "eic", 1.0, {})) == 2
        assert "/" not in line.replace("models/demo-small", "").replace("logs/bench/", "")


def test_bench_goes_on_after_a_failure_and_keeps_what_was_measured(tmp_path: Path) -> None:
    script = BenchScript(
        tmp_path, f'[[ "$*" = *weights*"--repeat 4"* ]] && exit 3; {MEASURES}; [ "$2" != sweep ]'
    )
    status, said, _ = script.run()
    assert status == 1
    assert script.kept() == [
        "compare-large",
        "compare-small",
        "overlap",
        "sweep",
    ]  # the sweep failed after its first rate
    assert said.endswith("failed: weights (status 3)\nfailed: sweep (status 1)\n")


def test_bench_begins_nothing_that_would_not_end_in_its_time(tmp_path: Path) -> None:
    script = BenchScript(tmp_path, MEASURES)
    path = tmp_path / "launch/bench.sh"
    path.write_text(path.read_text().replace("LIMIT_S=$((30 * 60))", "LIMIT_S=150"))
    status, said, asked = script.run()
    assert status == 1
    assert ["--pull-step" in line for line in asked] == [True]
    assert said.count("no time left") == 4


def test_bench_measures_only_what_it_is_told_and_not_again_what_it_has(tmp_path: Path) -> None:
    script = BenchScript(tmp_path, MEASURES)
    assert [line.split()[1] for line in script.run("--only", "sweep,weights")[2]] == ["weights", "sweep"]
    assert [line.split()[1] for line in script.run("--resume")[2]] == ["compare", "compare", "weights"]
    assert script.run("--resume")[2] == []
    assert len(script.run("--", "--dtype", "bfloat16")[2]) == 5
    (kept,) = script.results.glob("sweep-*.jsonl")
    kept.write_text('{"commit": "another"}\n')
    assert [line.split()[1] for line in script.run("--resume")[2]] == ["sweep"]
    status, said, _ = script.run("--only", "sweeep")
    assert (status, "'sweeep' is not one of" in said) == (2, True)


def test_a_failed_run_does_not_take_a_whole_ones_place_and_is_not_taken_for_one(tmp_path: Path) -> None:
    fails = f'{MEASURES}; echo again; exit "$(cat {tmp_path}/status)"'
    script = BenchScript(tmp_path, fails)
    (tmp_path / "status").write_text("1")
    assert script.run("--only", "sweep")[0] == 1
    assert len(script.run("--only", "sweep", "--resume")[2]) == 1
    (tmp_path / "status").write_text("0")
    assert script.run("--only", "sweep")[0] == 0
    (kept,) = script.results.glob("sweep-*.jsonl")
    kept.write_text(whole := kept.read_text() + "whole\n")
    (tmp_path / "status").write_text("1")
    assert script.run("--only", "sweep")[0] == 1
    assert kept.read_text() == whole


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_bench_told_to_stop_lets_what_runs_stop_its_servers(tmp_path: Path, number: signal.Signals) -> None:
    waits = f"sleep 600 & trap 'touch {tmp_path}/stopped; kill $!; exit 1' TERM; touch {tmp_path}/begun; wait"
    process = (script := BenchScript(tmp_path, waits)).start()
    deadline = time.monotonic() + 60
    while not (tmp_path / "begun").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert (tmp_path / "stopped").exists()
    assert len(script.asked.read_text().splitlines()) == 1
