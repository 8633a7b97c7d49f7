"""The control socket of a running cluster, and the commands that ask by it."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pdserve.errors import ConfigError, StartupError
from pdserve.up.cli import read_counts, restart_app, scale_app, status_app
from pdserve.up.control import SOCKET, Answer, Request, ask, served
from tests.support.up.cluster import running

FILE = """
[cluster]
name = "stand-in"
[router]
[[agg]]
"""


async def echoed(request: Request) -> Answer:
    return Answer(problem=f"{request.command} {request.counts}")


def answered(run_dir: Path, *requests: Request) -> list[Answer]:
    async def talk() -> list[Answer]:
        async with served(run_dir, echoed):
            return [await asyncio.to_thread(ask, run_dir, one, 10.0) for one in requests]

    return asyncio.run(talk())


def test_requests_are_answered_under_a_path_of_any_length(tmp_path: Path) -> None:
    run_dir = tmp_path / ("x" * 120)
    run_dir.mkdir()
    at = os.open(run_dir, os.O_PATH)
    with socket.socket(socket.AF_UNIX) as left:  # of an earlier supervisor
        left.bind(f"/proc/self/fd/{at}/{SOCKET}")
    os.close(at)
    with pytest.raises(StartupError, match="no cluster runs from here"):
        ask(run_dir, Request("status"), 1.0)
    found = answered(run_dir, Request("scale", {"decode": 2}), Request("restart"))
    assert [one.problem for one in found] == ["scale {'decode': 2}", "restart {}"]
    assert not (run_dir / SOCKET).exists()
    with pytest.raises(StartupError, match="no cluster runs from here"):
        ask(run_dir, Request("status"), 1.0)


@pytest.mark.parametrize("line", [b"{", b'{"command":"stop"}', b'{"command":"scale","counts":{"pool":2}}'])
def test_what_is_no_request_is_answered_so(tmp_path: Path, line: bytes) -> None:
    def talk() -> bytes:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(tmp_path / SOCKET))
            connection.sendall(line + b"\n")
            return connection.recv(1 << 16)

    async def both() -> bytes:
        async with served(tmp_path, echoed):
            return await asyncio.to_thread(talk)

    assert b"not a request" in asyncio.run(both())


def test_who_waits_when_the_cluster_stops_hears_it(tmp_path: Path) -> None:
    async def never(_: Request) -> Answer:
        raise OSError("the supervisor has ended")

    async def talk() -> None:
        async with served(tmp_path, never):
            await asyncio.to_thread(ask, tmp_path, Request("restart"), 10.0)

    with pytest.raises(StartupError, match="the cluster has stopped"):
        asyncio.run(talk())


@pytest.mark.parametrize("words", [["decode"], ["decode=two"], ["decode=-1"], ["pool=2"], ["agg=1", "agg=2"]])
def test_what_is_no_number_of_workers_is_refused(words: list[str]) -> None:
    assert read_counts(["decode=2", "prefill=0"]) == {"decode": 2, "prefill": 0}
    with pytest.raises(ConfigError, match="is not ROLE=N"):
        read_counts(words)


def test_a_running_cluster_is_asked_by_commands(tmp_path: Path) -> None:
    with running(tmp_path, FILE) as cluster:
        cluster.wait_for("stand-in is ready at")
        words = [str(tmp_path / "cluster.toml"), "--run-dir", str(cluster.run_dir)]
        run = CliRunner().invoke
        assert run(scale_app, [*words, "agg=2"]).output == "agg=2: done\n"
        shown = run(status_app, words).output.splitlines()
        assert [line.split() for line in shown] == [
            ["agg0", "agg", "this", "host", "ready"],
            ["agg1", "agg", "this", "host", "ready"],
            ["router", "router", "this", "host", "ready"],
        ]
        assert run(restart_app, words).output == "all processes have been restarted\n"
        refused = run(scale_app, [*words, "agg=0"])
        assert "no worker" in str(refused.exception)
