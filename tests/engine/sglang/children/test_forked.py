"""SGLang's processes as forks of the worker's own, in a process that is prepared as a worker is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import json, os, pathlib, socket, sys, threading, time
from types import SimpleNamespace
from pdserve.engine.sglang import prepare
prepare.choose("cpu")
from pdserve.engine.sglang.children import forked
import setproctitle
from sglang.srt.server_args import ServerArgs

def child(pipe, args, bound_fd):
    setproctitle.setproctitle("sglang::scheduler_TP0")
    title = pathlib.Path("/proc/self/cmdline").read_bytes().rstrip(b"\\0").decode()
    args.port = 1
    try:
        os.fstat(bound_fd)
        is_open = True
    except OSError:
        is_open = False
    import atexit
    atexit.register(pathlib.Path(sys.argv[1]).write_text, "ended")
    pipe.send({"title": title, "is_open": is_open, "parent": os.getppid() == parent})

if __name__ == "__main__":
    parent = os.getpid()
    before = dict(os.environ)
    os.environ.clear()  # as pdserve does while it resolves SGLang's arguments
    os.environ.update(before)
    engine = SimpleNamespace(mp="spawns")
    bound = socket.socket()
    args = ServerArgs(model_path="/none")
    forked.install(engine, args, [bound])
    ours, theirs = engine.mp.Pipe()
    process = engine.mp.Process(target=child, args=(theirs, args, bound.fileno()))
    process.start()
    said = ours.recv()
    process.join(30)
    said |= {"status": process.exitcode, "changed": args.port == 1}
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    beside_a_thread = SimpleNamespace(mp="spawns")
    forked.install(beside_a_thread, args, [bound])
    print(json.dumps(said | {"beside_a_thread": beside_a_thread.mp}))
"""


@pytest.mark.long
def test_a_forked_scheduler_has_its_title_and_its_own_end(tmp_path: Path) -> None:
    """The end of a worker finds its schedulers by their titles: without them it would not wait until they
    have released what they hold. Beside a running thread nothing is forked: a lock it holds would stay
    locked.
    """
    script = tmp_path / "script.py"
    script.write_text(CODE)
    words = [sys.executable, str(script), str(tmp_path / "end")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "title": "sglang::scheduler_TP0",
        "is_open": False,
        "parent": True,
        "status": 0,
        "changed": False,
        "beside_a_thread": "spawns",
    }
    assert (tmp_path / "end").read_text() == "ended"
    assert "SGLang's processes are spawned, which takes longer: threads run: " in done.stderr
