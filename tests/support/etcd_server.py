"""A real etcd server for tests."""

from __future__ import annotations

import base64
import shutil
import signal
import socket
import ssl
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from pdserve.discovery.config import EtcdConfig

START_TIMEOUT_S = 20.0


class EtcdServer:
    """Of one member; its data outlive `kill` and `start`. `tls`: its certificate, which is its own
    authority's, and its key. `auth_token`: what kind of tokens it gives.
    """

    def __init__(
        self,
        directory: Path,
        tls: tuple[Path, Path] | None = None,
        auth_token: str = "simple",
        *,
        asks_for_certificates: bool = False,
    ) -> None:
        program = shutil.which("etcd") or shutil.which("etcd", path="/usr/bin:/usr/local/bin")
        if program is None:
            pytest.fail("etcd is missing: apt-get install etcd-server")
        self._program = program
        self._directory = directory
        self._auth_token = auth_token
        with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two:
            self._ports = one.getsockname()[1], two.getsockname()[1]
        self._tls = tls
        self.port = self._ports[0]
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{self.port}"
        self.ca_file = "" if tls is None else str(tls[0])
        self._asks_for_certificates = asks_for_certificates
        self._verify: ssl.SSLContext | bool = False
        if tls is not None:
            self._verify = ssl.create_default_context(cafile=self.ca_file)
            self._verify.load_cert_chain(*tls)
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
            "auth-token": self._auth_token,
            "heartbeat-interval": "20",  # with these it starts at once, and knows leases of a second
            "election-timeout": "200",
        }
        command = [
            self._program,
            *(f"--{key}={value}" for key, value in arguments.items()),
            "--unsafe-no-fsync",
        ]
        if self._tls is not None:
            command += [f"--cert-file={self._tls[0]}", f"--key-file={self._tls[1]}"]
        if self._tls is not None and self._asks_for_certificates:
            command += ["--client-cert-auth", f"--trusted-ca-file={self._tls[0]}"]
        log = self._directory / "etcd.log"
        with log.open("ab") as out:
            self._process = subprocess.Popen(command, stdout=out, stderr=out)
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                if (
                    httpx.get(f"{self.url}/health", timeout=1, verify=self._verify).json().get("health")
                    == "true"
                ):
                    return
            except (httpx.HTTPError, ValueError):
                pass
            assert self._process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.02)

    def post(self, path: str, body: dict[str, Any], token: str = "") -> dict[str, Any]:
        """Ask it something, as an administrator."""
        headers = {"Authorization": token} if token else {}
        answer = httpx.post(f"{self.url}/v3/{path}", json=body, headers=headers, verify=self._verify)
        return dict(answer.raise_for_status().json())

    def put(self, key: str, value: str) -> None:
        """Without a lease: it stays."""
        self.post("kv/put", {"key": encoded(key), "value": encoded(value)})

    def keys(self, prefix: str) -> list[str]:
        """All that begin so; it ends with a slash."""
        first, last = (encoded(f"{prefix[:-1]}{end}") for end in "/0")
        found = self.post("kv/range", {"key": first, "range_end": last, "keys_only": True})
        return [base64.b64decode(one["key"]).decode() for one in found.get("kvs", [])]

    def value(self, key: str) -> str:
        """Of the key, which is there."""
        [found] = self.post("kv/range", {"key": encoded(key)})["kvs"]
        return base64.b64decode(found["value"]).decode()

    def ask_for_passwords(self, user: str, password: str, prefix: str) -> None:
        """From now on only this user may read and write, and only under the prefix."""
        for name in ("root", user):
            self.post("auth/user/add", {"name": name, "password": password})
            self.post("auth/role/add", {"name": name})
            self.post("auth/user/grant", {"user": name, "role": name})
        first, last = (encoded(f"{prefix}{end}") for end in "/0")
        permission = {"permType": "READWRITE", "key": first, "range_end": last}
        self.post("auth/role/grant", {"name": user, "perm": permission})
        self.post("auth/enable", {})

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


def encoded(text: str) -> str:
    """As keys and values are in etcd's JSON."""
    return base64.b64encode(text.encode()).decode()


def settings(etcd: EtcdServer, **options: Any) -> EtcdConfig:
    return EtcdConfig(endpoints=[etcd.url], **options)


def in_etcd(etcd: EtcdServer) -> dict[str, Any]:
    """Of a node's [cluster]."""
    return {"cluster": {"etcd": settings(etcd)}}
