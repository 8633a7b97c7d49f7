"""A warm server: one process that has imported torch, SGLang and pdserve, and forks whole workers.

    python -m tests.support.e2e.warm SOCKET        # then WarmProcess(SOCKET, ["agg", "--config", ...], log)

A forked worker calls `pdserve.cli.main` with its words, as `python -m pdserve` does, in a session of its own.
What libraries read from the environment while they load must be the same in all workers of a server: `FIXED`.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

THREADS: Final = "1"
"""OMP_NUM_THREADS of the warm server and its workers."""
FIXED: Final = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "TORCHDYNAMO_DISABLE", "PYTHONPATH")
LOADED: Final = (
    *("sglang.srt.entrypoints.http_server", "sglang.srt.managers.scheduler", "sglang.srt.models.registry"),
    *(
        "pdserve.engine.launch",
        "pdserve.decode.settle",
        "pdserve.prefill.routes",
        "pdserve.engine.sglang.storage",
    ),
    *("pdserve.engine.sglang.geometry", "tests.support.e2e.cpu_drafts"),
)
_MESSAGE_BYTES: Final = 1 << 20


class WarmProcess:
    """A worker of a warm server, with the methods of `subprocess.Popen` that tests use."""

    def __init__(self, server: str, words: Sequence[str], log: str, env: Mapping[str, str]) -> None:
        self.returncode: int | None = None
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.connect(server)
        asked = {"words": [*words], "env": {**os.environ, **env}, "cwd": str(Path.cwd())}
        with Path(log).open("ab") as file:
            socket.send_fds(self._socket, [json.dumps(asked).encode()], [file.fileno()])
        answer = json.loads(self._socket.recv(_MESSAGE_BYTES))
        if "error" in answer:
            raise ValueError(answer["error"])
        self.pid = int(answer["pid"])

    def poll(self) -> int | None:
        """The exit status, as Popen tells it; None: it runs."""
        return self._read(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""
        if (code := self._read(timeout)) is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired("pdserve", timeout)
        return code

    def send_signal(self, number: int) -> None:
        """To the process itself."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def _read(self, timeout: float | None) -> int | None:
        if self.returncode is None:
            self._socket.settimeout(timeout)
            with contextlib.suppress(TimeoutError, BlockingIOError):
                said = self._socket.recv(_MESSAGE_BYTES)
                self.returncode = json.loads(said)["code"] if said else -signal.SIGKILL
        return self.returncode


@dataclass(frozen=True)
class _Server:
    process: subprocess.Popen[bytes]
    socket: Path
    log: Path

    @property
    def is_up(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        return self.socket.exists()


@functools.cache
def begin() -> _Server:
    """Start the warm server of this process, which ends with it."""
    directory = Path(tempfile.mkdtemp(prefix="pdserve-warm-"))
    path, log = directory / "socket", directory / "log"
    with log.open("ab") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(path)],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env={**os.environ, "OMP_NUM_THREADS": THREADS},
        )
    atexit.register(process.kill)
    return _Server(process, path, log)


def is_up() -> bool:
    """Whether workers start at once. If not, the warm server still imports, which takes ten seconds or so."""
    return begin().is_up


def server() -> str:
    """The socket of the warm server, once it is up."""
    started = begin()
    while not started.is_up:
        time.sleep(0.1)
    return str(started.socket)


def import_s() -> float:
    """Processor seconds that the warm server took to import torch, SGLang and pdserve."""
    server()
    found = re.search(r"([0-9.]+) s of a core", begin().log.read_text())
    assert found is not None
    return float(found[1])


def load() -> None:
    """Import what workers use. They inherit it as it is."""
    from pdserve.engine.sglang import prepare

    before = dict(os.environ)
    prepare.choose("cpu")
    with prepare.without_gc():
        for name in LOADED:
            importlib.import_module(name)
    for name in os.environ.keys() - before.keys() - {*FIXED}:
        del os.environ[name]
    assert "prometheus_client" not in sys.modules, "it would not know the directory of a worker's metrics"


def serve(path: str) -> list[str]:
    """Fork workers until the server is killed. Returns in a worker: its words."""
    selector = selectors.DefaultSelector()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(f"{path}.not-yet")
    listener.listen()
    Path(f"{path}.not-yet").rename(path)
    selector.register(listener, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj is not listener:
                _report(selector, key)
                continue
            client, _ = listener.accept()
            said, fds, _, _ = socket.recv_fds(client, _MESSAGE_BYTES, 1)
            asked = json.loads(said)
            env = asked["env"]
            if wrong := [
                name for name in FIXED if env.get(name, os.environ.get(name)) != os.environ.get(name)
            ]:
                client.send(
                    json.dumps({"error": f"another {', '.join(wrong)} than the warm server's"}).encode()
                )
                client.close()
            elif pid := os.fork():
                client.send(json.dumps({"pid": pid}).encode())
                selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, client))
            else:
                for one in [*selector.get_map().values()]:
                    if one.data:
                        one.data[1].close()
                        os.close(one.fd)
                selector.close()
                listener.close()
                client.close()
                return _become(asked, fds[0])
            os.close(fds[0])


def _become(asked: Any, log: int) -> list[str]:
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDONLY)
    for fd, to in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(fd, to)
    os.close(nothing)
    os.close(log)
    os.environ.update(asked["env"])
    os.chdir(asked["cwd"])
    words: list[str] = asked["words"]
    sys.argv = ["pdserve", *words]
    return words


def _report(selector: selectors.BaseSelector, key: selectors.SelectorKey) -> None:
    pid, client = key.data
    _, status = os.waitpid(pid, 0)
    selector.unregister(key.fd)
    os.close(key.fd)
    with contextlib.suppress(OSError):
        client.send(json.dumps({"code": os.waitstatus_to_exitcode(status)}).encode())
    client.close()


def main() -> None:
    began = time.monotonic()
    load()
    gc.freeze()
    print(f"warm after {time.monotonic() - began:.1f} s, {time.process_time():.1f} s of a core", flush=True)
    words = serve(sys.argv[1])
    from pdserve.cli import main as run

    run(words)


if __name__ == "__main__":
    main()
