"""A whole cluster's secrets, each known here: no log, no output and no command line shows one."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from pdserve.settings.config_file import to_toml
from tests.support.kvpool.pools import arena_dir
from tests.support.left_behind import reaper

MARK = f"canary-of-{os.getpid()}"  # other processes of the machine are looked at too
KEY, ADMIN, TOKEN, POOL_ADMIN, POOL_CLUSTER, READ, WRITE, REDIS, METRICS, WRONG = (
    f"{MARK}-{name}-0123456789"
    for name in (
        "key",
        "admin",
        "token",
        "pool-admin",
        "pool-cluster",
        "read",
        "write",
        "redis",
        "metrics",
        "wrong",
    )
)
UP = """
import sys
from pdserve.up import cli
cli.PROGRAM = (sys.executable, "-m", "tests.support.up.real_but_workers")
from pdserve.cli import main
main(["up", sys.argv[1]])
"""
TIMEOUT_S = 60.0


class Seen:
    """Command lines of all processes, looked at again and again until it is closed."""

    def __init__(self) -> None:
        self.words: set[str] = set()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def _look(self) -> None:
        while True:
            over = self._over.wait(0.05)
            for entry in Path("/proc").iterdir():
                if entry.name.isdigit():
                    try:
                        self.words.add((entry / "cmdline").read_text(errors="replace"))
                    except OSError:
                        continue  # it has ended
            if over:
                return

    def close(self) -> None:
        self._over.set()
        self._thread.join()


def cluster_file(directory: Path) -> Path:
    """One pool node, one worker, a router; secrets as text, in files and, by `ENVIRONMENT`, in variables."""
    for name, secret in (("pool-admin", POOL_ADMIN), ("read", READ), ("redis", REDIS), ("metrics", METRICS)):
        (directory / name).write_text(f"{secret}\n")
    node = {
        "capacity_bytes": 64 << 20,
        "arena_dir": str(arena_dir() / directory.name),
        "keep": False,
        "log_level": "debug",
        "admin_token_file": str(directory / "pool-admin"),
        "metrics_token_file": str(directory / "metrics"),
        "namespaces": [{"name": "n", "read_token_file": str(directory / "read"), "write_token": WRITE}],
    }
    redis = {"url": "redis://127.0.0.1:1", "password_file": str(directory / "redis")}
    router = {"port": 0, "log_level": "debug", "redis": redis}
    file = directory / "cluster.toml"
    made = {"cluster": {"run_dir": str(directory / "run")}, "router": router, "pool": [node]}
    file.write_text(to_toml({**made, "worker": {"engine": {"model_path": "m"}}, "agg": [{}]}))
    return file


ENVIRONMENT = {
    "PDSERVE_CLUSTER_TOKEN": TOKEN,
    "PDSERVE_ADMIN_KEY": ADMIN,
    "PDSERVE_API_KEYS": f"alice={KEY}",
    "PDSERVE_POOL_CLUSTER_TOKEN": POOL_CLUSTER,
}


@contextmanager
def running(file: Path, log: Path) -> Iterator[dict[str, str]]:
    """The cluster as long as the block runs. Gives URLs of router and admin port, and the node's address."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", UP, str(file)],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | ENVIRONMENT,
            start_new_session=True,
        )
    reaper().watch(process.pid)
    try:
        with log.open() as said:
            text = ""
            while not (found := re.search(r"ready at (http://\S+) ", text)):
                assert process.poll() is None, text
                text += said.readline()
        router = tomllib.loads((file.parent / "run/router.toml").read_text())
        admin = f"http://127.0.0.1:{router['admin']['port']}"
        node = tomllib.loads((file.parent / "run/pool0.toml").read_text())
        yield {"router": found[1], "admin": admin, "pool": node["listen"][0]}
        process.terminate()
        assert process.wait(TIMEOUT_S) == 0
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(TIMEOUT_S)
        reaper().forget(process.pid)


def pool(word: str, address: str, *words: str, token: str = "", file: Path | None = None) -> tuple[int, str]:
    """Exit status and output of `pdserve pool`, as a process."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pdserve", "pool", *word.split(), address, *words),
            *(("--token-file", str(file)) if file else ()),
        ],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env=os.environ | {"PDSERVE_POOL_TOKEN": token},
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def use(at: dict[str, str], directory: Path) -> list[str]:
    """Right and wrong secrets at every door; what `pdserve pool` said."""

    def ask(url: str, key: str) -> int:
        headers = {"authorization": f"Bearer {key}"}
        body = {"model": "m", "messages": [{"role": "user", "content": f"{MARK}-prompt"}]}
        return httpx.post(url, json=body, headers=headers, trust_env=False, timeout=TIMEOUT_S).status_code

    chat = f"{at['router']}/v1/chat/completions"
    assert [ask(chat, key) for key in (KEY, WRONG)] == [200, 401]
    assert [ask(f"{at['admin']}/reload", key) for key in (ADMIN, WRONG)] == [200, 401]
    said = []
    for status, word, words in (
        (0, "status", ("--json",)),
        (0, "ns list", ("--json",)),
        (0, "ns set", ("n", "weight=2")),
        (0, "upgrade", ()),
        (0, "ns list", ()),
    ):
        done, text = pool(word, at["pool"], *words, file=directory / "pool-admin")
        assert done == status, text
        said.append(text)
    for secret in (READ, WRITE, WRONG):
        done, text = pool("ns list", at["pool"], token=secret)
        assert (done == 0) == (secret == WRITE), text
        said.append(text)
    return said


@pytest.mark.timeout(200)
def test_no_log_and_no_command_line_shows_a_secret(tmp_path: Path) -> None:
    seen = Seen()
    try:
        with running(cluster_file(tmp_path), tmp_path / "up.log") as at:
            said = use(at, tmp_path)
            found = psutil.process_iter(["cmdline"])  # None of one that has just ended
            assert [p for p in found if str(tmp_path) in str(p.info["cmdline"])]  # they can be seen
    finally:
        seen.close()
        shutil.rmtree(arena_dir(), ignore_errors=True)  # a stopped node keeps its pages' directory
    assert any(f"{tmp_path}/run/pool0.toml" in words for words in seen.words)
    shown = [words for words in seen.words if MARK in words]
    assert shown == []
    logs = [tmp_path / "up.log", *(tmp_path / "run").glob("*.log")]
    assert {log.name for log in logs} == {"up.log", "pool0.log", "agg0.log", "router.log"}
    for text in (*said, *(log.read_text() for log in logs)):
        assert MARK not in text
    assert "DEBUG" in (tmp_path / "run/router.log").read_text()
    assert "it was upgraded" in (tmp_path / "run/pool0.log").read_text()
    holders = [path for path in (tmp_path / "run").iterdir() if path.is_file() and MARK in path.read_text()]
    assert {path.name for path in holders} == {"pool0.toml", "agg0.toml", "router.toml"}
    assert {path.stat().st_mode & 0o777 for path in holders} == {0o600}
