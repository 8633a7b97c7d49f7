"""The supervisor over stand-in processes: real processes, signals and sockets, no SGLang."""

from __future__ import annotations

import fcntl
import http.client
import json
import os
import resource
import signal
import socket
import termios
import tomllib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from pdserve.up.launchers.sessions import session_members
from tests.support.up.cluster import (
    REAL_BUT_WORKERS,
    TIMEOUT_S,
    Cluster,
    processes_that_mention,
    running,
    wait_until,
)

DISAGG = """
[cluster]
name = "stand-in"
start_parallelism = 2
stop_grace_s = 5
[router]
journal = "JOURNAL"
[worker.engine]
journal = "JOURNAL"
[[pool]]
journal = "JOURNAL"
[[prefill]]
[[decode]]
"""


def ask(cluster: Cluster, name: str, path: str) -> None:
    config = tomllib.loads((cluster.run_dir / f"{name}.toml").read_text())
    home = config.get("engine", config)
    connection = http.client.HTTPConnection(home["host"], home["port"], timeout=10)
    try:
        connection.request("GET", path)
        connection.getresponse()
    finally:
        connection.close()


def ask_to_die(cluster: Cluster, name: str) -> None:
    with suppress(http.client.HTTPException, ConnectionError):
        ask(cluster, name, "/die")


def alive_sessions(cluster: Cluster) -> list[int]:
    return [pid for pid in cluster.started().values() if session_members(pid)]


def test_a_cluster_starts_finds_its_addresses_is_announced_and_stops_at_ctrl_c(tmp_path: Path) -> None:
    with running(tmp_path, DISAGG) as cluster:
        cluster.wait_for(r"stand-in is ready at http://127.0.0.1:\d+")
        cluster.wait_for(r"curl http://127.0.0.1:\d+/v1/chat/completions .*stand-in-model")
        notes = [(entry["role"], entry["what"]) for entry in cluster.journal()]
        assert notes[0] == ("pool", "start")
        for role in ("prefill", "decode"):
            assert notes.index((role, "ready")) < notes.index(("router", "start"))
        configs = {entry["role"]: entry["config"] for entry in cluster.journal()}
        socket_path = f"unix:{cluster.run_dir}/pool0.sock"
        assert configs["pool"]["listen"] == [socket_path]
        assert configs["prefill"]["pool"]["nodes"] == [{"node": "pool0", "address": socket_path}]
        for role in ("prefill", "decode"):
            assert configs["router"][role] == [f"http://127.0.0.1:{configs[role]['engine']['port']}"]
        assert any(line.startswith("decode0  | decode listens") for line in cluster.lines)
        assert (cluster.run_dir / "decode0.log").read_text() == "decode listens\n"
        assert (cluster.run_dir / "lock").read_text() == f"{cluster.process.pid}\n"
        with running(tmp_path, DISAGG) as second:
            assert second.finish() == 1
            assert f"a cluster runs from here already (process {cluster.process.pid})" in second.lines[0]
        cluster.process.send_signal(signal.SIGINT)
        assert cluster.finish() == 0
        stopped = [line.split()[2] for line in cluster.lines if line.endswith("has stopped")]
        assert stopped == ["router", "prefill0", "decode0", "pool0"]
        assert not alive_sessions(cluster)
        assert not processes_that_mention(str(tmp_path))


def test_kill_9_of_the_supervisor_leaves_no_process(tmp_path: Path) -> None:
    toml = DISAGG.replace("[[prefill]]", '[[prefill]]\nengine.behave = "stubborn"')
    toml = toml.replace("[[decode]]", '[[decode]]\nengine.behave = "parent"')
    with running(tmp_path, toml) as cluster:
        cluster.wait_for(r"stand-in is ready at")
        cluster.process.kill()
        cluster.process.wait()
        wait_until(lambda: not alive_sessions(cluster), "the reaper ends every session")
        wait_until(lambda: not processes_that_mention(str(tmp_path)), "nothing is left")


def test_a_death_is_seen_at_once_though_a_child_holds_its_output_and_so_is_a_log_without_room(
    tmp_path: Path,
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "decode0.log").symlink_to("/dev/full")
    with running(tmp_path, DISAGG.replace("[router]", '[router]\nbehave = "parent"')) as cluster:
        cluster.wait_for(r"error: .*/decode0.log: no longer written: No space left on device")
        cluster.wait_for(r"stand-in is ready at")
        first = cluster.started()["router"]
        os.kill(first, signal.SIGKILL)
        cluster.wait_for(r"error: router was killed by SIGKILL")
        cluster.wait_for(r"router is ready")
        assert not session_members(first)


def test_a_rolling_restart_takes_every_process_in_order_and_what_dies_later_is_restarted_on_its_port(
    tmp_path: Path,
) -> None:
    def ignore_hang_up() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does

    toml = DISAGG.replace("[[prefill]]", '[[prefill]]\nengine.behave = "graceful"')
    with running(tmp_path, toml, preexec_fn=ignore_hang_up) as cluster:
        cluster.wait_for(r"stand-in is ready at")
        before, known = cluster.started(), len(cluster.journal())
        cluster.process.send_signal(signal.SIGHUP)  # stops nothing
        cluster.ask_to_restart()
        cluster.wait_for(r"all processes have been restarted")
        notes = [(e["role"], e["what"]) for e in cluster.journal()[known:] if e["what"] != "ready"]
        assert [note for note in notes if note[1] == "start"] == [("prefill", "start"), ("decode", "start")]
        cluster.wait_for_note("router", "reload")  # it replaces itself
        # it goes on as the new version by itself, and nothing else is restarted before it has
        assert notes[:2] == [("pool", "upgrade"), ("pool", "upgraded")]
        ready = [line.split()[2] for line in cluster.lines if " is ready after " in line]
        assert ready[4:] == ["prefill0", "decode0"]
        assert set(before.values()) & set(cluster.started().values()) == {before["pool"], before["router"]}
        assert not any("error" in line for line in cluster.lines)
        ask_to_die(cluster, "decode0")
        for said in (
            "error: decode0 exited with status 4",
            "asked to die",
            "restarting decode0",
            "decode0 is ready",
        ):
            cluster.wait_for(said)
        starts = [line for line in cluster.journal() if (line["role"], line["what"]) == ("decode", "start")]
        assert [line["again"] for line in starts] == [False, True, True]  # it may be less strict then
        assert len({line["config"]["engine"]["port"] for line in starts}) == 1
        assert (cluster.run_dir / "decode0.log").read_text().count("decode listens") == 3
        cluster.process.send_signal(signal.SIGINT)
        assert cluster.finish() == 0


def test_nothing_is_restarted_while_a_pool_node_is_upgraded_and_a_stop_waits_for_no_upgrade(
    tmp_path: Path,
) -> None:
    toml = DISAGG.replace("[[pool]]", f'[[pool]]\nupgrades_when = "{tmp_path / "never"}"')
    with running(tmp_path, toml) as cluster:
        cluster.wait_for(r"stand-in is ready at")
        before = cluster.started()
        cluster.ask_to_restart()
        cluster.wait_for(r"upgrading pool0")
        cluster.wait_for_note("pool", "upgrade")
        cluster.process.send_signal(signal.SIGTERM)
        assert cluster.finish() == 0
        assert cluster.started() == before
        assert not processes_that_mention(str(tmp_path))


def test_a_port_in_use_is_one_line_before_anything_is_started(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        toml = DISAGG.replace("[router]", f"[router]\nport = {port}")
        with running(tmp_path, toml) as cluster:
            assert cluster.finish() == 1
            assert cluster.lines == [
                f"REFUSED router: port {port} on 127.0.0.1 is in use; "
                "stop what listens there or give another with --port"
            ]
            assert not (tmp_path / "journal").exists()


@pytest.mark.parametrize(("room", "file"), [(0, "run"), (20, "run/pool0.toml")])
def test_a_run_directory_without_room_is_refused_with_one_line(tmp_path: Path, room: int, file: str) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))

    with running(tmp_path, DISAGG, preexec_fn=limit) as cluster:
        assert cluster.finish() == 1
        assert cluster.lines == [f"REFUSED {tmp_path / file}: cannot be written: File too large"]


Console = Iterator[tuple[dict[str, Any], Callable[[], None]]]
"""Where the output goes, and what becomes of that once all is up."""


@contextmanager
def full_disk() -> Console:
    with Path("/dev/full").open("w") as full:
        yield {"stdout": full}, lambda: None


@contextmanager
def unread_pipe() -> Console:
    unread, ours = os.pipe()
    fcntl.fcntl(unread, fcntl.F_SETPIPE_SZ, 4096)
    yield {"stdout": ours, "stderr": ours}, lambda: os.close(ours)
    os.close(unread)


@contextmanager
def lost_terminal() -> Console:
    """It is not the supervisor's controlling one: no SIGHUP comes."""
    terminal, ours = os.openpty()
    yield {"stdout": ours, "stderr": ours}, lambda: (os.close(ours), os.close(terminal))  # type: ignore[func-returns-value]


@pytest.mark.parametrize("console", [full_disk, unread_pipe, lost_terminal])
def test_a_console_that_takes_nothing_stalls_no_process_and_a_signal_still_stops_the_cluster(
    tmp_path: Path, console: Callable[[], AbstractContextManager[Any]]
) -> None:
    with console() as (output, lose), running(tmp_path, DISAGG, **output) as cluster:
        cluster.wait_for_note("router", "ready")
        lose()
        ask(cluster, "decode0", "/talk")
        ask_to_die(cluster, "decode0")
        wait_until(lambda: len([e for e in cluster.journal() if e["what"] == "start"]) == 5, "restarted")
        cluster.process.send_signal(signal.SIGTERM)
        assert cluster.process.wait(TIMEOUT_S) == 0
        assert not processes_that_mention(str(tmp_path))


def test_the_hang_up_of_its_terminal_stops_the_cluster(tmp_path: Path) -> None:
    terminal, ours = os.openpty()

    def control() -> None:
        fcntl.ioctl(ours, termios.TIOCSCTTY, 0)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # these tests may run under nohup

    with running(tmp_path, DISAGG, stdout=ours, stderr=ours, preexec_fn=control) as cluster:
        os.close(ours)
        cluster.wait_for_note("router", "ready")
        os.close(terminal)
        assert cluster.process.wait(TIMEOUT_S) == 0
        assert not processes_that_mention(str(tmp_path))


ODD_NAME = 'M\u00f6del "x" \u30e2\u30c7\u30eb \\'
DEAD_PROXY = "http://127.0.0.1:9"
ODD = """
[cluster]
name = "odd"
host = "{host}"
[router]
insecure = true
[[pool]]
capacity_bytes = "32MiB"
metrics = "{pool_host}:0"
keep = false
[[agg]]
engine.served_model_name = {name}
engine.model_path = {name}
"""


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_proxies_the_locale_odd_names_and_ipv6_change_nothing(
    tmp_path_factory: pytest.TempPathFactory, host: str
) -> None:
    """A real pool node and router; of the two families of addresses only one is used."""
    home = tmp_path_factory.mktemp("odd") / f"L\u00e4ufe {ODD_NAME}"
    home.mkdir()
    bracketed = f"[{host}]" if ":" in host else host
    toml = ODD.format(host=host, pool_host=bracketed, name=json.dumps(ODD_NAME))
    proxies = dict.fromkeys(("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy"), DEAD_PROXY)
    proxies |= {"ALL_PROXY": "socks5h://127.0.0.1:9", "all_proxy": "socks5h://127.0.0.1:9", "NO_PROXY": "x"}
    environ = {**proxies, "LC_ALL": "C"}
    with running(home, toml, program=REAL_BUT_WORKERS, variables=environ) as cluster:
        said = cluster.wait_for(r"odd is ready at (http://\S+?)(,|;|:? |$)")
        url = said[1]
        assert url.startswith(f"http://{bracketed}:")
        with httpx.Client(trust_env=False) as client:
            listed = client.get(f"{url}/v1/models").json()["data"]
            assert [one["id"] for one in listed] == [ODD_NAME]
            asked = {"model": ODD_NAME, "messages": [{"role": "user", "content": "\u00fc"}]}
            assert client.post(f"{url}/v1/chat/completions", json=asked).status_code == 200
        cluster.process.send_signal(signal.SIGINT)
        assert cluster.finish() == 0
