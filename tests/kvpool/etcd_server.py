"""A real etcd server for tests."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import httpx
import pytest

START_TIMEOUT_S = 20.0


class EtcdServer:
    """Of one member; its data outlive `kill` and `start`."""

    def __init__(self, directory: Path) -> None:
        program = shutil.which("etcd") or shutil.which("etcd", path="/usr/bin:/usr/local/bin")
        if program is None:
            pytest.fail("etcd is missing: apt-get install etcd-server")
        self._program = program
        self._directory = directory
        with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two:
            self._ports = one.getsockname()[1], two.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._ports[0]}"
        self._process: subprocess.Popen[bytes]
        self.start()

    def start(self) -> None:
        peer = f"http://127.0.0.1:{self._ports[1]}"
        arguments = {
            "data-dir": str(self._directory / "etcd"),
            "listen-client-urls": self.url,
            "advertise-client-urls": self.url,
            "listen-peer-urls": peer,
            "initial-advertise-peer-urls": peer,
            "initial-cluster": f"default={peer}",
        }
        command = [
            self._program,
            *(f"--{key}={value}" for key, value in arguments.items()),
            "--unsafe-no-fsync",
        ]
        log = self._directory / "etcd.log"
        with log.open("ab") as out:
            self._process = subprocess.Popen(command, stdout=out, stderr=out)
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                if httpx.get(f"{self.url}/health", timeout=1).json().get("health") == "true":
                    return
            except (httpx.HTTPError, ValueError):
                pass
            assert self._process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.02)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(10)

    def pause(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def wipe(self) -> None:
        """All its data are lost; while it is down."""
        shutil.rmtree(self._directory / "etcd")
