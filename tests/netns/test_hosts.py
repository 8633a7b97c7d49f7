"""Hosts with network, mounts, memory and processes of their own: which data path each pair of them takes."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.certificates import Authority
from tests.support.netns.field import until
from tests.support.netns.lab import ROOT, cannot, python_at
from tests.support.netns.machines import Machines, machines
from tests.support.netns.paths import BYTES
from tests.support.processes import HarnessError

TIMEOUT_S = 60.0
MOST_PROCESSES = 4
"""That a host without a service has: its init, a shell, and who looks."""
LOOK = """
import json, os, socket
print(json.dumps({
    "name": socket.gethostname(),
    "others": sorted(socket.gethostbyname(name) for name in ("one", "two")),
    "memory": os.listdir("/dev/shm"),
    "own": os.listdir(OWN),
    "processes": sum(name.isdigit() for name in os.listdir("/proc")),
}))
"""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    directory = tmp_path_factory.mktemp("hosts")
    try:
        with machines(
            ("one", "two", "desk"), directory, directory / "own", {"two": "export OF=two\n"}
        ) as made:
            yield made
    except HarnessError as error:
        cannot(error)


def ask(hosts: Machines, host: str, *words: str) -> str:
    done = subprocess.run(
        python_at(hosts, host, *words),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_host_has_all_of_its_own(hosts: Machines) -> None:
    own = str(hosts.own)
    ask(hosts, "one", "-c", f"open('/dev/shm/x', 'w'); open({own!r} + '/y', 'w')")
    seen = {
        host: json.loads(ask(hosts, host, "-c", LOOK.replace("OWN", repr(own)))) for host in ("one", "two")
    }
    addresses = [hosts.network.address(host) for host in ("one", "two")]
    assert [(one["name"], one["others"]) for one in seen.values()] == [("one", addresses), ("two", addresses)]
    assert [(one["memory"], one["own"]) for one in seen.values()] == [(["x"], ["y"]), ([], [])]
    assert all(one["processes"] <= MOST_PROCESSES for one in seen.values())
    assert ask(hosts, "two", "-c", "import os; print(os.environ['OF'])") == "two\n"


def test_a_power_cut_ends_all_of_it_and_it_comes_back_with_empty_memory(hosts: Machines) -> None:
    with subprocess.Popen(
        python_at(
            hosts,
            "two",
            "-c",
            "import time; open('/dev/shm/x', 'w'); print('up', flush=True); time.sleep(600)",
        ),
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        hosts.off("two")
        assert process.wait(TIMEOUT_S) != 0
    hosts.on("two")
    assert ask(hosts, "two", "-c", "import os; print(os.listdir('/dev/shm'))") == "[]\n"


@pytest.mark.extended
@pytest.mark.parametrize(
    ("way", "far"), [("tcp", "TcpConnection"), ("ucx", "UcxConnection"), ("tls", "TcpConnection")]
)
def test_memory_is_mapped_within_a_host_and_never_between_two(
    hosts: Machines, tmp_path: Path, way: str, far: str
) -> None:
    address = f"tcp:{hosts.network.address('one')}:7700"
    config = (
        f'name = "one"\nlisten = ["{address}"]\narena_dir = "/dev/shm/pool"\ncapacity_bytes = "64MiB"\n'
        "keep = false\ninsecure = true\n"
    )
    if way == "ucx":
        config += "ucx.trusted_network = true\n"
    ca: list[str] = []
    if way == "tls":
        tls = Authority(tmp_path).host(hosts.network.address("one"))
        config += f'tls.ca = "{tls.ca}"\ntls.certificate = "{tls.certificate}"\ntls.key = "{tls.key}"\n'
        ca = [str(tls.ca)]
    file, log = tmp_path / "node.toml", tmp_path / "node.log"
    file.write_text(config)
    with log.open("wb") as out:
        serve = python_at(hosts, "one", "-m", "pdserve", "pool", "serve", "--config", str(file))
        node = subprocess.Popen(serve, stdout=out, stderr=out, cwd=ROOT)
    until(lambda: "is ready at" in log.read_text(), log.read_text)
    look = ("-m", "tests.support.netns.paths", address)
    try:
        near = json.loads(ask(hosts, "one", *look, "1", "auto", *ca))
        before = hosts.network.received_bytes("one")
        other = json.loads(ask(hosts, "two", *look, "2", "ucx" if way == "ucx" else "auto", *ca))
        crossed = hosts.network.received_bytes("one") - before
    finally:
        node.kill()
        node.wait()
        hosts.off("one")  # the node itself
        hosts.on("one")
    assert near == {"path": "ShmConnection", "stored": True, "is_right": True}
    assert other == {"path": far, "stored": True, "is_right": True}
    assert crossed > BYTES
