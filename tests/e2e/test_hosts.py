"""launch/hosts.toml with real SGLang on three hosts of their own networks, mounts, memory and processes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pdserve.router.request.call import parse_cached
from pdserve.up.launchers.launcher import SHELL_VARIABLE
from tests.support.e2e.cluster import Process
from tests.support.netns.lab import ROOT, cannot, python_at
from tests.support.netns.machines import Machines, machines
from tests.support.processes import HarnessError
from tests.support.up.scripts import LAUNCH

pytestmark = [pytest.mark.e2e, pytest.mark.extended, pytest.mark.timeout(1200)]

HOSTS = ("a", "b", "c", "desk")
STOP_TIMEOUT_S = 120.0
PAGE = 64


def cluster_file(directory: Path) -> tuple[Path, str]:
    """launch/hosts.toml for little memory, and an API key."""
    keys = directory / "keys"
    made = subprocess.run(
        [sys.executable, "-m", "pdserve", "key", "tester", "--file", str(keys)],
        capture_output=True, text=True, check=True, cwd=ROOT,
    )  # fmt: skip
    text = (LAUNCH / "hosts.toml").read_text().replace("router.toml", str(LAUNCH / "router.toml"))
    text = text.replace("/etc/pdserve/keys", str(keys)).replace('"2GiB"', '"256MiB"')
    text = text.replace("[worker.engine]", "[worker.engine]\nmax_total_tokens = 40000\nhicache_size_gb = 1")
    file = directory / "hosts.toml"
    file.write_text(text)
    return file, made.stdout.split()[-1]


def up(hosts: Machines, directory: Path, model: Path, file: Path) -> Process:
    named = ",".join(f"{host}={hosts.network.address(host)}" for host in HOSTS[:-1])
    flags = ["--on", "ssh", "--hosts", named, "--model", str(model), "--run-dir", str(directory / "run")]
    command = python_at(hosts, HOSTS[-1], "-m", "pdserve", "up", str(file), *flags)
    log = directory / "up.log"
    started = Process("up", command, log, {SHELL_VARIABLE: str(hosts.shell)}).start()
    started.wait_ready(lambda: "hosts is ready at" in log.read_text())
    return started


def test_a_conversation_goes_over_two_routers_and_its_pages_from_host_to_host(
    model: Path, tmp_path: Path
) -> None:
    try:
        with machines(HOSTS, tmp_path, tmp_path / "run") as hosts:
            file, key = cluster_file(tmp_path)
            supervisor = up(hosts, tmp_path, model, file)
            urls = [f"http://{hosts.network.address(host)}:8000" for host in ("a", "b")]
            asked = subprocess.run(
                python_at(hosts, HOSTS[-1], "-m", "tests.support.netns.ask", key, *urls, *urls),
                capture_output=True, text=True, check=True, cwd=ROOT,
            )  # fmt: skip
            answers = [json.loads(line) for line in asked.stdout.splitlines()]
            assert [answer["status"] for answer in answers] == [200] * len(answers)
            # the prefill worker's pages came over three hosts' nodes to another host
            cached = [parse_cached(answer["headers"]["x-pdserve-cached"]) for answer in answers]
            assert cached[0]["pool"] >= PAGE
            assert all(sum(one.values()) - one["computed"] >= PAGE for one in cached)
            # both routers send the session to one worker, which has the earlier turns in its own memory
            own = [one["device"] + one["host"] for one in cached[1:]]
            assert min(own) >= PAGE, (cached, [answer["headers"] for answer in answers])
            assert supervisor.popen is not None
            supervisor.popen.terminate()
            assert supervisor.popen.wait(STOP_TIMEOUT_S) == 0, supervisor.tail()
    except HarnessError as error:
        cannot(error)
    log = (tmp_path / "up.log").read_text()
    stopped = re.findall(r"\| (\S+) has stopped", log)
    assert stopped == ["router0", "router1", "prefill0", "decode0", "decode1", "pool0", "pool1", "pool2"]
