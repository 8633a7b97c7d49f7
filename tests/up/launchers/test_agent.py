"""The process that starts one of ours on another host: what it does when the supervisor is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pdserve.errors import StartupError
from pdserve.resources.machine import Gpu, Machine
from pdserve.up.config import ClusterSettings
from pdserve.up.launchers.agent import KILL, SIGNALLED, Order, claim_gpus
from pdserve.up.launchers.launcher import SshLauncher
from pdserve.up.launchers.running import AGENT

ROOT = Path(__file__).parents[3]
TIMEOUT_S = 30
TALKS = "import signal, sys, time\n{}\nprint('up', flush=True)\nwhile True: time.sleep(60)"
POLITE = TALKS.format("signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))")
STUBBORN = TALKS.format("signal.signal(signal.SIGTERM, signal.SIG_IGN)")


class Agent:
    """One, with a process that runs `code`."""

    def __init__(
        self,
        tmp_path: Path,
        code: str,
        *,
        grace_s: float = 20.0,
        patience_s: float = 60.0,
        name: str = "one",
        at_once: Sequence[bytes] = (),
        **gpus: Any,
    ) -> None:
        order = Order(
            argv=[sys.executable, "-c", code],
            environment={"OF_THE_ORDER": "yes"},
            config_path=str(tmp_path / "run" / f"{name}.toml"),
            config="a = 1\n",
            grace_s=grace_s,
            patience_s=patience_s,
            **gpus,
        )
        self.process = subprocess.Popen(
            AGENT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            start_new_session=True,
        )
        self.say(b"\n".join([msgspec.json.encode(order), *at_once]))

    def say(self, line: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + b"\n")
        self.process.stdin.flush()

    def line(self) -> bytes:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def status(self) -> int:
        return self.process.wait(TIMEOUT_S)

    def __enter__(self) -> Agent:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.communicate(timeout=TIMEOUT_S)


def test_the_process_has_its_configuration_and_its_variables_and_gives_its_status(tmp_path: Path) -> None:
    code = "import os, sys; print(os.environ['OF_THE_ORDER'], flush=True); sys.exit(4)"
    config = tmp_path / "run/one.toml"
    with Agent(tmp_path, code) as agent:
        assert agent.line() == b"yes\n"
        assert agent.status() == 4
    written = config.stat().st_ino
    with Agent(tmp_path, "pass") as agent:
        assert agent.status() == 0
    assert config.stat().st_ino == written, "what is there already is left: two could refuse each other"
    assert config.read_text() == "a = 1\n"
    assert config.stat().st_mode & 0o777 == 0o600


def test_signals_reach_it_and_a_kill_is_told_as_a_signal(tmp_path: Path) -> None:
    with Agent(tmp_path, POLITE) as polite:
        assert polite.line() == b"up\n"
        polite.say(b"")  # the supervisor is there
        polite.say(str(int(signal.SIGTERM)).encode())
        assert polite.status() == 7
    with Agent(tmp_path, STUBBORN) as stubborn:
        assert stubborn.line() == b"up\n"
        stubborn.say(KILL)
        assert stubborn.status() == SIGNALLED + signal.SIGKILL
    with Agent(tmp_path, POLITE, at_once=[KILL]) as agent:
        assert agent.status() == SIGNALLED + signal.SIGKILL, "what follows the order at once is heard"


@pytest.mark.parametrize("is_lost", [True, False])
@pytest.mark.parametrize(
    ("code", "grace_s", "status"), [(POLITE, 20.0, 7), (STUBBORN, 0.2, SIGNALLED + signal.SIGKILL)]
)
def test_a_lost_supervisor_or_one_that_asks_for_it_ends_it_within_its_grace(
    tmp_path: Path, code: str, grace_s: float, status: int, is_lost: bool
) -> None:
    with Agent(tmp_path, code, grace_s=grace_s) as agent:
        assert agent.line() == b"up\n"
        if is_lost:
            assert agent.process.stdin is not None
            agent.process.stdin.close()
            agent.process.stdin = None
        else:
            agent.process.terminate()
        assert agent.status() == status


def test_a_silent_supervisor_is_lost(tmp_path: Path) -> None:
    with Agent(tmp_path, TALKS.format(""), patience_s=0.2) as agent:
        assert agent.status() == SIGNALLED + signal.SIGTERM


def test_it_ends_with_the_agent(tmp_path: Path) -> None:
    with Agent(tmp_path, POLITE) as agent:
        assert agent.line() == b"up\n"
        agent.process.kill()
        agent.process.wait()
        assert agent.line() == b""  # the end of the last process that holds the pipe


def test_a_second_one_of_its_name_waits_until_the_first_has_ended(tmp_path: Path) -> None:
    with Agent(tmp_path, POLITE) as first:
        assert first.line() == b"up\n"
        with Agent(tmp_path, "print('second', flush=True)") as second:
            with Agent(tmp_path, "print('other', flush=True)", name="other") as other:
                assert other.line() == b"other\n"
            first.say(str(int(signal.SIGTERM)).encode())
            first.status()
            assert second.line() == b"second\n"


def test_what_cannot_be_started_is_a_line(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(mode=0o700)
    (tmp_path / "run").chmod(0o777)
    with Agent(tmp_path, POLITE) as agent:
        assert b"cannot be started here" in agent.line()
        assert agent.status() == 1


def test_hosts_have_names_and_addresses() -> None:
    def hosts(*given: str) -> dict[str, str]:
        return SshLauncher({}, ClusterSettings(hosts=[*given])).hosts()

    assert hosts("a", "b=10.0.0.2") == {"a": "a", "b": "10.0.0.2"}
    with pytest.raises(StartupError, match=r"'=10\.0\.0\.2' is not a host's own name"):
        hosts("=10.0.0.2")
    with pytest.raises(StartupError, match="'a=x' is not a host's own name"):
        hosts("a", "a=x")
    with pytest.raises(StartupError, match=r"give cluster\.hosts"):
        hosts()


FOUR = Machine(
    memory_bytes=1, shm_bytes=1, gpus=tuple(Gpu(index=i, memory_bytes=1, numa_node=i // 2) for i in range(4))
)


def claimed(folder: Path, count: int, *numbers: int, others: Sequence[int] = ()) -> tuple[Any, list[int]]:
    order = Order(
        argv=[], environment={}, config_path="/x", config="", grace_s=1.0, patience_s=1.0,
        gpu_count=count, gpu_numbers=[*numbers], gpus_of_others=[*others],
    )  # fmt: skip
    return claim_gpus(FOUR, order, folder, 0.0)


def test_workers_of_a_host_get_gpus_of_their_own_until_they_end(tmp_path: Path) -> None:
    first, locks = claimed(tmp_path, 2)
    second, _ = claimed(tmp_path, 1, 3)
    assert (first, second) == ((0, 1), (3,))
    with pytest.raises(StartupError, match="2 GPUs of 0, 1, 2, 3 are needed here, and 1 are free"):
        claimed(tmp_path, 2)
    with pytest.raises(StartupError, match="1 GPUs of 3 are needed here, and 0 are free"):
        claimed(tmp_path, 1, 3)
    for lock in locks:
        os.close(lock)
    with pytest.raises(StartupError, match="2 GPUs of 1, 3 are needed here, and 1 are free"):
        claimed(tmp_path, 2, others=[0, 2])  # a worker that names those may start later
    assert claimed(tmp_path, 3)[0] == (0, 1, 2)


def test_a_process_that_needs_gpus_is_not_started_on_a_host_without(tmp_path: Path) -> None:
    with Agent(tmp_path, "pass", gpu_count=1, needs_gpus=True) as agent:
        assert agent.line() == b"cannot be started here: this host has no GPU\n"
        assert agent.status() == 1
    with Agent(tmp_path, "print('on the CPU')", gpu_count=1) as agent:
        assert agent.line() == b"on the CPU\n"
