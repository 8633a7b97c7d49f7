"""What a benchmark that is stopped or killed leaves of the clusters it started: nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.node_processes import memory_dir
from benchmarks.serving import cluster
from benchmarks.serving.cluster import PREFIX, workplace

# a cluster whose worker never becomes ready
BENCHMARK = """
import sys, tempfile
from pathlib import Path
import msgspec
from benchmarks.processes import stopped_cleanly
from benchmarks.serving import cluster, contenders
def contender(*given):
    chosen = contenders.contender(*given)
    tables = {**chosen.tables, "agg": [{"env": {"PYTHONPATH": sys.argv[2]}}]}
    return msgspec.structs.replace(chosen, tables=tables)
cluster.contender = contender
tempfile.tempdir = sys.argv[1]
cluster.memory_dir = lambda: Path(sys.argv[1])
with stopped_cleanly(), cluster.workplace(None) as (directory, memory):
    setting = contenders.Setting(
        model_path="/m",
        directory=directory,
        device_tokens=640,
        arena_directory=memory,
        pool_capacity="128MiB",
    )
    with cluster.launched("agg", setting):
        pass
"""


def until(true: Callable[[], bool], within_s: float = 120.0) -> None:
    deadline = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def running(directory: Path) -> list[str]:
    """Commands of pdserve's that name a file in the directory."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:  # it ended meanwhile
            continue
        if str(directory) in command and "-m pdserve" in command:
            found.append(command)
    return found


@pytest.fixture
def short_path() -> Iterator[Path]:
    """Sockets lie below: their paths have 107 bytes at most."""
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_stopped_or_killed_benchmark_leaves_no_process_and_no_directory(
    number: signal.Signals, tmp_path: Path, short_path: Path
) -> None:
    (hang := tmp_path / "hang").mkdir()
    (hang / "sitecustomize.py").write_text("import time; time.sleep(600)")
    place = short_path
    command = [sys.executable, "-c", BENCHMARK, str(place), str(hang)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        until(lambda: {"pool", "agg"} <= {words.split()[3] for words in running(place)})
        until(lambda: any(place.rglob("arena")))
        process.send_signal(number)
        process.wait(120)
        until(lambda: not running(place))
    finally:
        process.kill()
        process.wait()
    if number == signal.SIGKILL:
        assert any(place.iterdir())  # the next benchmark removes it
    else:
        assert not any(place.iterdir())


# a peer's server that listens to nothing
PEER = """
import sys, time
from pathlib import Path
from benchmarks.processes import server
with server("peer", ["sleep", "600"], Path(sys.argv[1]), lambda: True) as process:
    print(process.pid, flush=True)
    time.sleep(600)
"""


def test_a_killed_benchmark_leaves_no_server_of_a_peer(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PEER, str(tmp_path / "log")]
    bench = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert bench.stdout is not None
        peer = Path("/proc", bench.stdout.readline().decode().strip())
        assert peer.exists()
    finally:
        bench.kill()
        bench.communicate()
    until(lambda: not (peer / "exe").exists(), 10.0)  # a zombie has none


def test_the_next_benchmark_removes_what_a_killed_one_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    for name in (f"{PREFIX}{dead.pid}-x", f"{PREFIX}{os.getpid()}-x", "other"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(cluster, "memory_dir", lambda: tmp_path)
    assert memory_dir is not cluster.memory_dir
    with workplace(None):
        assert not (tmp_path / f"{PREFIX}{dead.pid}-x").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", f"{PREFIX}{os.getpid()}-x"]
