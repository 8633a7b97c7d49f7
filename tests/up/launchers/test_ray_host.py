"""What an actor of Ray starts, without Ray: nothing of it outlives the actor, however that ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import psutil
import pytest

from pdserve.up.launchers.agent import KILL, SIGNALLED, Order
from pdserve.up.launchers.ray_host import Host
from pdserve.up.launchers.running import AGENT
from tests.support.up.cluster import processes_that_mention, wait_until

ROOT = Path(__file__).parents[3]
ASK_S = 30.0
HOLDS_ON = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('{} up', flush=True)\n"
FOR_EVER = "while True: time.sleep(60)"
CHILD = HOLDS_ON.format("child") + FOR_EVER
STUBBORN = f"{HOLDS_ON.format('process')}\nimport subprocess, sys\n" + (
    f"subprocess.Popen([sys.executable, '-c', {CHILD!r}, sys.argv[1]])\n{FOR_EVER}"
)
ACTOR = """
import sys
from pdserve.up.launchers.ray_host import Host
host = Host(sys.argv[2:], ".")
host.say(sys.argv[1].encode() + b"\\n")
print("started", flush=True)
while True:
    print(host.output()[0].decode(), end="", flush=True)
"""


def order(tmp_path: Path, code: str) -> bytes:
    return msgspec.json.encode(
        Order(
            argv=[sys.executable, "-c", code, str(tmp_path)],
            environment={},
            config_path=str(tmp_path / "run" / "one.toml"),
            config="a = 1\n",
            grace_s=0.2,
            patience_s=60.0,
        )
    )


@contextmanager
def actor(tmp_path: Path, code: str) -> Iterator[subprocess.Popen[str]]:
    """A process in an actor's place."""
    words = [sys.executable, "-c", ACTOR, order(tmp_path, code).decode(), *AGENT]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for_lines(process: subprocess.Popen[str], *wanted: str) -> None:
    assert process.stdout is not None
    left = set(wanted)
    while left:
        line = process.stdout.readline()
        assert line, f"ended before {left}"
        left.discard(line.strip())


@pytest.mark.parametrize("lines", [("started",), ("process up", "child up")], ids=["starting", "up"])
@pytest.mark.parametrize("first", ["actor", "its children"])
def test_a_process_and_its_children_end_with_a_killed_actor(
    tmp_path: Path, lines: tuple[str, ...], first: str
) -> None:
    """Ray kills an actor's children with it."""
    with actor(tmp_path, STUBBORN) as process:
        wait_for_lines(process, *lines)
        if first == "its children":
            for child in psutil.Process(process.pid).children():
                child.kill()
        process.kill()
        process.wait()
        wait_until(lambda: not processes_that_mention(str(tmp_path)), "nothing is left")


def test_the_host_gives_output_and_status_on_and_passes_signals(tmp_path: Path) -> None:
    polite = (
        "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\n"
        f"print('process up', flush=True)\n{FOR_EVER}"
    )
    for line, expected in ((str(int(signal.SIGTERM)).encode(), 7), (KILL, SIGNALLED + signal.SIGKILL)):
        host = Host(AGENT, str(ROOT))
        host.say(order(tmp_path, polite) + b"\n")
        said, status = b"", None
        while status is None:
            output, status = host.output()
            said += output
            if said.endswith(b"\n"):
                host.say(line + b"\n")
        assert (said, status) == (b"process up\n", expected)
        assert (tmp_path / "run/one.toml").read_text() == "a = 1\n"
    host.say(b"\n")  # to nobody


def test_the_host_needs_nothing_but_the_standard_library() -> None:
    path = Path(sys.modules[Host.__module__].__file__ or "")
    words = [sys.executable, "-I", "-S", str(path)]
    subprocess.run(words, check=True, timeout=ASK_S, env={"PATH": os.environ["PATH"]})
