"""Two hosts for `ssh` on this machine: 127.0.0.1 and 127.0.0.2, by a real sshd with keys of its own."""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pdserve.up.launchers.launcher import SHELL, SHELL_VARIABLE

TIMEOUT_S = 20.0
SERVER = """
Port {port}
ListenAddress 127.0.0.1
ListenAddress 127.0.0.2
HostKey {directory}/host-key
AuthorizedKeysFile {directory}/key.pub
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
PermitRootLogin prohibit-password
MaxStartups 100
SetEnv PYTHONPATH="{pythonpath}" HOME="{directory}"
"""
"""A command runs in a shell, which reads what is at home: what a developer's takes, or says, is not ours."""
CLIENT = """
Host n1
  HostName 127.0.0.1
Host n2
  HostName 127.0.0.2
Host *
  Port {port}
  User {user}
  IdentityFile {directory}/key
  StrictHostKeyChecking no
  UserKnownHostsFile /dev/null
  LogLevel ERROR
"""


@contextmanager
def ssh_hosts(directory: Path) -> Iterator[dict[str, str]]:
    """Variables by which a supervisor reaches `n1` and `n2`. Skips the test where sshd is missing."""
    sshd = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if sshd is None or os.geteuid() != 0:
        what = "it takes root" if sshd else "sshd is missing (apt-get install openssh-server)"
        pytest.skip(f"sshd cannot be started, so --on ssh is NOT tested: {what}")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for name in ("host-key", "key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", directory / name], check=True)
    values = {
        "port": port,
        "directory": directory,
        "user": getpass.getuser(),
        "pythonpath": os.environ.get("PYTHONPATH", ""),
    }
    (directory / "sshd_config").write_text(SERVER.format(**values))
    (directory / "ssh_config").write_text(CLIENT.format(**values))
    Path("/run/sshd").mkdir(exist_ok=True)  # where it gives its privileges up
    log = directory / "sshd.log"
    with log.open("wb") as out:
        process = subprocess.Popen([sshd, "-D", "-e", "-f", directory / "sshd_config"], stderr=out)
    try:
        deadline = time.monotonic() + TIMEOUT_S
        while "listening on 127.0.0.2" not in log.read_text():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.02)
        yield {SHELL_VARIABLE: f"{SHELL} -F {directory}/ssh_config"}
    finally:
        process.terminate()
        process.wait(TIMEOUT_S)
