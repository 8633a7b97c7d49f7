"""The supervisor over stand-in processes: real processes, signals and sockets, no SGLang."""

from __future__ import annotations

import fcntl
import http.client
import os
import resource
import signal
import socket
import termios
import tomllib
from contextlib import suppress
from pathlib import Path

import pytest

from pdserve.up.sessions import session_members
from tests.support.certificate import certificate
from tests.support.up.cluster import TIMEOUT_S, Cluster, processes_that_mention, running, wait_until

DISAGG = """
[cluster]
name = "stand-in"
restart_backoff_s = 0.05
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


def test_stages_start_in_order_each_after_the_one_before_is_ready(tmp_path: Path) -> None:
    with running(tmp_path, DISAGG) as cluster:
        cluster.wait_for(r"stand-in is ready at")
        notes = [(entry["role"], entry["what"]) for entry in cluster.journal()]
        assert notes[0] == ("pool", "start")
        assert {notes[1], notes[2]} <= {
            ("prefill", "start"),
            ("decode", "start"),
            ("prefill", "ready"),
            ("decode", "ready"),
        }
        router_start = notes.index(("router", "start"))
        assert notes.index(("prefill", "ready")) < router_start
        assert notes.index(("decode", "ready")) < router_start


def test_processes_get_each_others_addresses(tmp_path: Path) -> None:
    with running(tmp_path, DISAGG) as cluster:
        cluster.wait_for(r"stand-in is ready at")
        configs = {entry["role"]: entry["config"] for entry in cluster.journal()}
        socket_path = f"unix:{cluster.run_dir}/pool0.sock"
        assert configs["pool"]["listen"] == [socket_path]
        assert configs["prefill"]["pool"]["nodes"] == [{"node": "pool0", "address": socket_path}]
        for role in ("prefill", "decode"):
            assert configs["router"][role] == [f"http://127.0.0.1:{configs[role]['engine']['port']}"]


def test_announces_url_and_curl_with_the_served_model(tmp_path: Path) -> None:
    with running(tmp_path, DISAGG) as cluster:
        cluster.wait_for(r"stand-in is ready at http://127.0.0.1:\d+")
        cluster.wait_for(r"curl http://127.0.0.1:\d+/v1/chat/completions .*stand-in-model")


def test_the_curl_has_what_a_router_with_keys_asks_for(tmp_path: Path) -> None:
    toml = DISAGG.replace("[worker.engine]", '[router.access]\nkeys_file = "keys"\n[worker.engine]')
    with running(tmp_path, toml) as cluster:
        cluster.wait_for(
            r"curl -H 'Authorization: Bearer YOUR_KEY' http://127.0.0.1:\d+/v1/chat/completions "
        )


def test_the_curl_takes_the_certificate_of_a_router_that_speaks_tls(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    access = f'[router.access]\ntls_cert_file = "{cert}"\ntls_key_file = "{key}"\n'
    with running(tmp_path, DISAGG.replace("[worker.engine]", f"{access}[worker.engine]")) as cluster:
        cluster.wait_for(r"curl -k https://127.0.0.1:\d+/v1/chat/completions .*stand-in-model")


def test_logs_are_prefixed_and_kept_whole(tmp_path: Path) -> None:
    with running(tmp_path, DISAGG) as cluster:
        cluster.wait_for(r"stand-in is ready at")
        assert any(line.startswith("decode0  | decode listens") for line in cluster.lines)
        assert (cluster.run_dir / "decode0.log").read_text() == "decode listens\n"


def test_ctrl_c_stops_every_process_router_first_and_pool_last(tmp_path: Path) -> None:
    with running(tmp_path, DISAGG) as cluster:
        cluster.wait_for(r"stand-in is ready at")
        cluster.process.send_signal(signal.SIGINT)
        assert cluster.finish() == 0
        stopped = [line.split()[2] for line in cluster.lines if line.endswith("has stopped")]
        assert stopped == ["router", "prefill0", "decode0", "pool0"]
        assert not alive_sessions(cluster)
        assert not processes_that_mention(str(tmp_path))


def test_sigterm_while_starting_stops_what_has_started(tmp_path: Path) -> None:
    toml = DISAGG.replace("[[decode]]", '[[decode]]\nengine.behave = "never_ready"')
    with running(tmp_path, toml) as cluster:
        cluster.wait_for(r"decode listens")
        cluster.process.send_signal(signal.SIGTERM)
        assert cluster.finish() == 0
        assert not processes_that_mention(str(tmp_path))


def test_a_process_that_ignores_sigterm_is_killed_after_the_grace_with_its_children(tmp_path: Path) -> None:
    toml = DISAGG.replace("stop_grace_s = 5", "stop_grace_s = 0.3")
    toml = toml.replace("[[prefill]]", '[[prefill]]\nengine.behave = "stubborn"')
    toml = toml.replace("[[decode]]", '[[decode]]\nengine.behave = "parent"')
    with running(tmp_path, toml) as cluster:
        cluster.wait_for(r"stand-in is ready at")
        assert len(session_members(cluster.started()["decode"])) == 2
        cluster.process.send_signal(signal.SIGINT)
        assert cluster.finish() == 0
        assert not alive_sessions(cluster)


def test_kill_9_of_the_supervisor_leaves_no_process(tmp_path: Path) -> None:
    toml = DISAGG.replace("[[prefill]]", '[[prefill]]\nengine.behave = "stubborn"')
    toml = toml.replace("[[decode]]", '[[decode]]\nengine.behave = "parent"')
    with running(tmp_path, toml) as cluster:
        cluster.wait_for(r"stand-in is ready at")
        cluster.process.kill()
        cluster.process.wait()
        wait_until(lambda: not alive_sessions(cluster), "the warden ends every session")
        wait_until(lambda: not processes_that_mention(str(tmp_path)), "nothing is left")


def test_a_process_that_dies_at_start_is_reported_with_its_last_lines_and_stops_the_rest(
    tmp_path: Path,
) -> None:
    toml = DISAGG.replace("[[decode]]", '[[decode]]\nengine.behave = "die_at_start"')
    with running(tmp_path, toml) as cluster:
        assert cluster.finish() == 1
        text = "\n".join(cluster.lines)
        assert "error: decode0 exited with status 3 before it was ready; its whole log: " in text
        shown = [line.split("|     ")[1] for line in cluster.lines if "|     line" in line]
        assert shown == [f"line {i}" for i in range(10, 30)]
        assert not any("starting router" in line for line in cluster.lines)
        assert not processes_that_mention(str(tmp_path))


def test_a_process_that_is_never_ready_is_reported_after_the_time_limit(tmp_path: Path) -> None:
    toml = DISAGG.replace("[[decode]]", '[[decode]]\nengine.behave = "never_ready"')
    toml = toml.replace("start_parallelism = 2", "start_parallelism = 2\nstart_timeout_s = 4.0")
    with running(tmp_path, toml) as cluster:
        assert cluster.finish() == 1
        assert any("decode0 was not ready within 4 s" in line for line in cluster.lines)
        assert not processes_that_mention(str(tmp_path))


def test_a_worker_that_dies_later_is_reported_and_started_again_on_the_same_port(tmp_path: Path) -> None:
    with running(tmp_path, DISAGG) as cluster:
        cluster.wait_for(r"stand-in is ready at")
        first = cluster.started()["decode"]
        ask_to_die(cluster, "decode0")
        cluster.wait_for(r"error: decode0 exited with status 4")
        cluster.wait_for(r"asked to die")
        cluster.wait_for(r"restarting decode0")
        cluster.wait_for(r"decode0 is ready")
        assert cluster.started()["decode"] != first
        starts = [line for line in cluster.journal() if (line["role"], line["what"]) == ("decode", "start")]
        assert [line["again"] for line in starts] == [False, True]  # it may be less strict then
        assert (cluster.run_dir / "decode0.log").read_text().count("decode listens") == 2
        assert cluster.process.poll() is None


def test_a_death_is_seen_at_once_though_the_dead_ones_child_lives_and_holds_its_output(
    tmp_path: Path,
) -> None:
    with running(tmp_path, DISAGG.replace("[router]", '[router]\nbehave = "parent"')) as cluster:
        cluster.wait_for(r"stand-in is ready at")
        first = cluster.started()["router"]
        os.kill(first, signal.SIGKILL)
        cluster.wait_for(r"error: router was killed by SIGKILL")
        cluster.wait_for(r"router is ready")
        assert not session_members(first)


def test_a_death_at_start_is_reported_though_the_dead_ones_child_lives(tmp_path: Path) -> None:
    toml = DISAGG.replace("[[decode]]", '[[decode]]\nengine.behave = "orphan"')
    with running(tmp_path, toml) as cluster:
        assert cluster.finish() == 1
        assert any(
            "error: decode0 exited with status 3 before it was ready" in line for line in cluster.lines
        )
        assert not processes_that_mention(str(tmp_path))


def test_sigusr1_restarts_every_process_in_order_each_once_the_one_before_is_ready(tmp_path: Path) -> None:
    toml = DISAGG.replace("[[prefill]]", '[[prefill]]\nengine.behave = "graceful"')
    with running(tmp_path, toml) as cluster:
        cluster.wait_for(r"stand-in is ready at")
        before, known = cluster.started(), len(cluster.journal())
        cluster.process.send_signal(signal.SIGUSR1)
        cluster.wait_for(r"all processes have been restarted")
        notes = [(e["role"], e["what"]) for e in cluster.journal()[known:] if e["what"] == "start"]
        assert notes == [("pool", "start"), ("prefill", "start"), ("decode", "start"), ("router", "start")]
        ready = [line.split()[2] for line in cluster.lines if " is ready after " in line]
        assert ready[4:] == ["pool0", "prefill0", "decode0", "router"]
        assert not set(before.values()) & set(cluster.started().values())
        assert not any("error" in line for line in cluster.lines)
        assert (cluster.run_dir / "decode0.log").read_text().count("decode listens") == 2
        ask_to_die(cluster, "decode0")  # what dies later is restarted as before
        cluster.wait_for(r"restarting decode0")
        cluster.wait_for(r"decode0 is ready")
        cluster.process.send_signal(signal.SIGINT)
        assert cluster.finish() == 0


def test_sigusr1_leaves_a_router_of_several_processes_to_itself(tmp_path: Path) -> None:
    with running(tmp_path, DISAGG.replace("[router]", "[router]\nprocesses = 2")) as cluster:
        cluster.wait_for(r"stand-in is ready at")
        before = cluster.started()
        cluster.process.send_signal(signal.SIGUSR1)
        cluster.wait_for(r"all processes have been restarted")
        wait_until(lambda: "reload" in [e["what"] for e in cluster.journal() if e["role"] == "router"], "hup")
        after = cluster.started()
        assert {role for role in before if before[role] != after[role]} == {"pool", "prefill", "decode"}


def test_a_renewed_process_that_cannot_start_is_restarted_as_often_as_any_other(tmp_path: Path) -> None:
    toml = DISAGG.replace("[[decode]]", '[[decode]]\nengine.behave = "die_at_restart"\nengine.status = 5')
    toml = toml.replace("[cluster]", "[cluster]\nmax_restarts = 2")
    with running(tmp_path, toml) as cluster:
        cluster.wait_for(r"stand-in is ready at")
        cluster.process.send_signal(signal.SIGUSR1)
        cluster.wait_for(
            r"decode0 exited with status 5 before it was ready and stays ended; the others go on"
        )
        text = "\n".join(cluster.lines)
        assert text.count("error: decode0 exited with status 5 before it was ready") == 3
        cluster.wait_for(r"all processes have been restarted")
        ask(cluster, "router", "/ready")


def test_sigusr1_goes_on_once_a_renewed_process_that_died_is_ready_and_can_come_again(tmp_path: Path) -> None:
    toml = DISAGG.replace("[[decode]]", '[[decode]]\nengine.behave = "stumble"\nengine.status = 5')
    with running(tmp_path, toml) as cluster:
        cluster.wait_for(r"stand-in is ready at")
        cluster.process.send_signal(signal.SIGUSR1)
        cluster.wait_for(r"error: decode0 exited with status 5")
        cluster.wait_for(r"restarting decode0")
        cluster.wait_for(r"decode0 is ready")
        cluster.wait_for(r"router is ready")
        cluster.wait_for(r"all processes have been restarted")
        cluster.process.send_signal(signal.SIGUSR1)
        cluster.wait_for(r"all processes have been restarted")


def test_sigusr1_goes_on_when_a_renewed_process_has_ended_for_good(tmp_path: Path) -> None:
    toml = DISAGG.replace("[[decode]]", '[[decode]]\nengine.behave = "die_at_restart"\nengine.status = 0')
    with running(tmp_path, toml) as cluster:
        cluster.wait_for(r"stand-in is ready at")
        cluster.process.send_signal(signal.SIGUSR1)
        cluster.wait_for(r"decode0 exited with status 0 before it was ready and stays ended")
        cluster.wait_for(r"router is ready")
        cluster.wait_for(r"all processes have been restarted")
        assert cluster.process.poll() is None


def test_a_worker_that_ends_by_itself_with_status_0_stays_ended_and_the_others_serve_on(
    tmp_path: Path,
) -> None:
    toml = DISAGG.replace("[[decode]]", '[[decode]]\nengine.behave = "graceful"')
    with running(tmp_path, toml) as cluster:
        cluster.wait_for(r"stand-in is ready at")
        os.kill(cluster.started()["decode"], signal.SIGTERM)
        cluster.wait_for(r"decode0 exited with status 0 and stays ended")
        ask(cluster, "router", "/ready")
        cluster.process.send_signal(signal.SIGINT)
        assert cluster.finish() == 0
        assert [e["role"] for e in cluster.journal() if e["what"] == "start"].count("decode") == 1


def test_the_routers_end_takes_the_cluster_down_whatever_its_status(tmp_path: Path) -> None:
    with running(tmp_path, DISAGG.replace("[router]", '[router]\nbehave = "graceful"')) as cluster:
        cluster.wait_for(r"stand-in is ready at")
        os.kill(cluster.started()["router"], signal.SIGTERM)
        assert cluster.finish() == 1
        assert any("router exited with status 0 and is not restarted" in line for line in cluster.lines)


@pytest.mark.parametrize("victim", ["pool", "decode"])
def test_a_process_that_may_not_be_restarted_stays_ended_and_the_others_serve_on(
    tmp_path: Path, victim: str
) -> None:
    toml = DISAGG.replace(f"[[{victim}]]", f'[[{victim}]]\nrestart = "never"')
    with running(tmp_path, toml) as cluster:
        cluster.wait_for(r"stand-in is ready at")
        os.kill(cluster.started()[victim], signal.SIGKILL)
        cluster.wait_for(rf"error: {victim}0 was killed by SIGKILL")
        cluster.wait_for(
            rf"{victim}0 was killed by SIGKILL and stays ended; the others go on; its whole log: "
        )
        ask(cluster, "router", "/ready")
        ask_to_die(cluster, "prefill0")
        cluster.wait_for(r"prefill0 is ready")
        cluster.process.send_signal(signal.SIGTERM)
        assert cluster.finish() == 0


def test_with_stop_on_loss_a_worker_that_is_not_restarted_takes_the_cluster_down(tmp_path: Path) -> None:
    toml = DISAGG.replace("[[decode]]", '[[decode]]\nrestart = "never"')
    toml = toml.replace("[cluster]", "[cluster]\nstop_on_loss = true")
    with running(tmp_path, toml) as cluster:
        cluster.wait_for(r"stand-in is ready at")
        os.kill(cluster.started()["decode"], signal.SIGKILL)
        assert cluster.finish() == 1
        assert any("decode0 was killed by SIGKILL and is not restarted" in line for line in cluster.lines)
        assert not processes_that_mention(str(tmp_path))


def test_a_restarted_process_that_is_late_is_restarted_again_and_stops_nothing(tmp_path: Path) -> None:
    toml = DISAGG.replace("[[decode]]", '[[decode]]\nengine.behave = "hang_once"')
    toml = toml.replace("[cluster]", "[cluster]\nstart_timeout_s = 4.0")
    with running(tmp_path, toml) as cluster:
        cluster.wait_for(r"stand-in is ready at")
        ask_to_die(cluster, "decode0")
        cluster.wait_for(r"error: decode0 was not ready within 4 s")
        cluster.wait_for(r"restarting decode0")
        cluster.wait_for(r"decode0 is ready")
        assert cluster.process.poll() is None


def test_a_process_that_cannot_be_started_again_stops_nothing(tmp_path: Path) -> None:
    with running(tmp_path, DISAGG.replace("[cluster]", "[cluster]\nmax_restarts = 1")) as cluster:
        cluster.wait_for(r"stand-in is ready at")
        log = cluster.run_dir / "decode0.log"
        log.unlink()
        log.mkdir()
        ask_to_die(cluster, "decode0")
        cluster.wait_for(r"decode0.log: cannot be written: Is a directory and stays ended")
        ask(cluster, "router", "/ready")
        assert cluster.process.poll() is None


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


def test_a_second_cluster_in_the_same_directory_is_refused(tmp_path: Path) -> None:
    with running(tmp_path, DISAGG) as cluster:
        cluster.wait_for(r"stand-in is ready at")
        with running(tmp_path, DISAGG) as second:
            assert second.finish() == 1
            assert f"a cluster runs from here already (process {cluster.process.pid})" in second.lines[0]
        assert cluster.process.poll() is None


def test_the_run_directory_names_its_supervisor_only_while_it_runs(tmp_path: Path) -> None:
    with running(tmp_path, DISAGG) as cluster:
        cluster.wait_for(r"stand-in is ready at")
        assert (cluster.run_dir / "lock").read_text() == f"{cluster.process.pid}\n"
        cluster.process.send_signal(signal.SIGTERM)
        assert cluster.finish() == 0
        assert (cluster.run_dir / "lock").read_text() == ""


@pytest.mark.parametrize(("room", "file"), [(0, "run"), (20, "run/pool0.toml")])
def test_a_run_directory_without_room_is_refused_with_one_line(tmp_path: Path, room: int, file: str) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))

    with running(tmp_path, DISAGG, preexec_fn=limit) as cluster:
        assert cluster.finish() == 1
        assert cluster.lines == [f"REFUSED {tmp_path / file}: cannot be written: File too large"]


def test_a_log_that_cannot_be_written_is_said_once_and_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "decode0.log").symlink_to("/dev/full")
    with running(tmp_path, DISAGG) as cluster:
        cluster.wait_for(r"error: .*/decode0.log: no longer written: No space left on device")
        cluster.wait_for(r"stand-in is ready at")


def test_a_full_disk_under_the_console_stalls_no_process_and_a_signal_still_stops_the_cluster(
    tmp_path: Path,
) -> None:
    with Path("/dev/full").open("w") as full, running(tmp_path, DISAGG, stdout=full) as cluster:
        cluster.wait_for_note("router", "ready")
        ask(cluster, "decode0", "/talk")
        cluster.process.send_signal(signal.SIGTERM)
        assert cluster.process.wait(TIMEOUT_S) == 0
        assert not processes_that_mention(str(tmp_path))


def test_a_console_that_nobody_reads_stalls_no_process_and_a_signal_still_stops_the_cluster(
    tmp_path: Path,
) -> None:
    unread, ours = os.pipe()
    fcntl.fcntl(unread, fcntl.F_SETPIPE_SZ, 4096)
    try:
        with running(tmp_path, DISAGG, stdout=ours, stderr=ours) as cluster:
            cluster.wait_for_note("router", "ready")
            ask(cluster, "decode0", "/talk")
            ask_to_die(cluster, "decode0")
            wait_until(lambda: len([e for e in cluster.journal() if e["what"] == "start"]) == 5, "restarted")
            cluster.process.send_signal(signal.SIGTERM)
            assert cluster.process.wait(TIMEOUT_S) == 0
            assert not processes_that_mention(str(tmp_path))
    finally:
        os.close(ours)
        os.close(unread)


def test_a_terminal_that_goes_away_silences_the_console_and_stalls_no_process(tmp_path: Path) -> None:
    terminal, ours = os.openpty()
    with running(tmp_path, DISAGG, stdout=ours, stderr=ours) as cluster:
        os.close(ours)
        cluster.wait_for_note("router", "ready")
        os.close(terminal)  # not the supervisor's controlling one: no SIGHUP comes
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


def test_a_hang_up_that_was_ignored_before_the_start_as_by_nohup_stops_nothing(tmp_path: Path) -> None:
    def ignore() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    with running(tmp_path, DISAGG, preexec_fn=ignore) as cluster:
        cluster.wait_for(r"stand-in is ready at")
        cluster.process.send_signal(signal.SIGHUP)
        cluster.process.send_signal(signal.SIGUSR1)
        cluster.wait_for(r"all processes have been restarted")
