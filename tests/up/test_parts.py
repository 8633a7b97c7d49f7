"""The supervisor's small parts: restarts, line splitting, ports, the console, sessions."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from pdserve.errors import StartupError
from pdserve.up.config import ClusterSettings
from pdserve.up.console import MAX_WAITING_BYTES, Console
from pdserve.up.launchers.running import LineSplitter
from pdserve.up.launchers.sessions import session_members
from pdserve.up.lifecycle import restart_delay_s
from pdserve.up.locks import free_ports, is_free, run_directory
from tests.support.addresses import names_of

SETTINGS = ClusterSettings(max_restarts=3)


@pytest.mark.parametrize(
    ("restart", "status", "restarts_s", "delay_s"),
    [
        ("never", 1, [], None),
        ("on-failure", 0, [], None),
        ("on-failure", 1, [], 1.0),
        ("on-failure", -9, [990.0], 2.0),
        ("on-failure", 1, [980.0, 990.0], 4.0),
        ("on-failure", 1, [970.0, 980.0, 990.0], None),
        ("on-failure", 1, [100.0, 200.0, 990.0], 2.0),
    ],
)
def test_restart_backs_off_and_gives_up(
    restart: Any, status: int, restarts_s: list[float], delay_s: float | None
) -> None:
    assert restart_delay_s(restart, status, restarts_s, 1000.0, SETTINGS) == delay_s


@pytest.mark.parametrize("piece_bytes", [1, 2, 3, 100])
def test_lines_are_the_same_however_the_bytes_arrive(piece_bytes: int) -> None:
    data = "one\r\ntwo\n\n 50 %\r100 %\nlast é".encode()
    splitter = LineSplitter()
    lines = [
        line for at in range(0, len(data), piece_bytes) for line in splitter.feed(data[at : at + piece_bytes])
    ] + splitter.close()
    assert lines == ["one", "two", " 50 %", "100 %", "last é"]
    assert splitter.feed(b"x" * 20_000) == ["x" * 20_000], "a line without end is shown in pieces"


def test_a_name_that_is_cut_inside_a_character_hides_no_session() -> None:
    rename = "import ctypes; ctypes.CDLL(None).prctl(15, 'aプロセスの名前'.encode(), 0, 0, 0)"
    code = f"{rename}; print(flush=True); import sys; sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        with pytest.raises(UnicodeDecodeError):
            Path(f"/proc/{process.pid}/stat").read_text()
        members = session_members(process.pid)
        assert process.stdin is not None
        process.stdin.close()
    assert members == [process.pid]


def test_a_console_drops_the_oldest_lines_that_nobody_reads_and_says_how_many() -> None:
    reads, writes = os.pipe()
    with os.fdopen(writes, "w") as stream, os.fdopen(reads) as reader:
        console = Console(stream, ["a"])
        count = 3 * MAX_WAITING_BYTES // 1000  # one batch is being written, one waits
        for number in range(count):
            console.log("a", f"{number} " + "x" * 1000)
        shown = threading.Thread(target=console.close)
        shown.start()
        lines = [reader.readline()]
        while not lines[-1].startswith(f"a  | {count - 1} "):
            lines.append(reader.readline())
        shown.join()
        dropped = [int(line.split()[2]) for line in lines if "lines not shown" in line]
        assert sum(dropped) > 0
        assert len(lines) - len(dropped) + sum(dropped) == count
        assert sum(map(len, lines)) < 2 * MAX_WAITING_BYTES + 100_000


def test_a_console_that_hung_writes_to_no_other_file() -> None:
    reads, writes = os.pipe()
    other_reads, other_writes = os.pipe()
    console = Console(os.fdopen(writes, "w", closefd=False), ["a"])
    console.log("a", "x" * 100_000)
    console.close()
    os.dup2(other_writes, writes)  # the stream was closed, and its number taken by another file
    os.close(reads)
    console._writer.join(30.0)
    assert not console._writer.is_alive()
    os.close(writes)
    os.close(other_writes)
    with os.fdopen(other_reads, "rb") as other:
        assert other.read() == b""


def test_a_port_is_free_where_a_server_could_have_it_whatever_else_the_name_stands_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", names_of("2001:db8::1", "127.0.0.1"))
    assert is_free("localhost", 0)
    first = next(free_ports("localhost", random.Random(7)))
    with socket.create_server(("127.0.0.1", first)):
        assert not is_free("localhost", first)
        assert next(free_ports("localhost", random.Random(7))) != first
    monkeypatch.setattr(socket, "getaddrinfo", names_of("2001:db8::1"))
    with pytest.raises(StartupError, match="cannot listen on localhost:1024: Cannot assign"):
        is_free("localhost", 1024)


def test_a_run_directory_whose_name_is_no_text_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="is not UTF-8") as refused:
        run_directory(tmp_path / os.fsdecode(b"a\xff"))
    assert str(refused.value).isascii()
