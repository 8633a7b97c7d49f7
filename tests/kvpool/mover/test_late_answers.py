"""Calls in flight never exchange their answers, however late these come. The mover is a thread here."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from pdserve.errors import PoolUnavailable
from pdserve.kvpool.mover import supervisor
from pdserve.kvpool.mover.lane import Lane
from pdserve.kvpool.mover.messages import VERSION, Done, Exists, Start, Started, decode_call, encode
from pdserve.kvpool.mover.supervisor import LANES, MoverBroken, MoverProcess

LATE = "late"


class TheirLane(Lane):
    """The mover's end, which works on while a test breaks ours."""

    receive = Lane.receive


class ScriptedMover:
    """In place of `subprocess.Popen`: answers each `Exists` with its last key, and one whose first key is
    LATE once it may.
    """

    pid = 0
    may_answer = threading.Event()
    answered = threading.Semaphore(0)

    def __init__(self, args: list[str], *, pass_fds: list[int], **_: object) -> None:
        copies = {fd: os.dup(fd) for fd in pass_fds}
        life, *lanes = (TheirLane(socket.socket(fileno=fd)) for fd in copies.values())
        assert int(args[-1]) == pass_fds[0]
        for work in (lambda: self.greet(life), *(lambda lane=lane: self.serve(lane) for lane in lanes)):
            threading.Thread(target=work, daemon=True).start()

    def greet(self, life: Lane) -> None:
        life.receive()
        life.send(encode(Started(), life.number))

    def serve(self, lane: Lane) -> None:
        try:
            while True:
                call = decode_call(lane.receive())
                assert isinstance(call, Exists)
                if call.keys[0] == LATE:
                    self.may_answer.wait(20.0)
                lane.send(encode(Done(0, call.keys[-1].encode()), lane.number))
                self.answered.release()
        except OSError:
            self.answered.release()

    def kill(self) -> None:
        self.may_answer.set()

    def wait(self, timeout_s: float) -> int:
        return 0


@pytest.fixture
def mover(monkeypatch: pytest.MonkeyPatch) -> Iterator[MoverProcess]:
    monkeypatch.setattr(supervisor.subprocess, "Popen", ScriptedMover)
    ScriptedMover.may_answer, ScriptedMover.answered = threading.Event(), threading.Semaphore(0)

    def start(lanes: list[int]) -> Start:
        return Start(version=VERSION, lanes=lanes, parts={}, pool={}, namespace="", geometry={}, name="")

    made = MoverProcess(start)
    yield made
    made.end()


def ask(mover: MoverProcess, *keys: str, timeout_s: float = 20.0) -> Any:
    return mover.call(Exists(list(keys), ["kv"]), timeout_s)


def test_the_late_answer_of_one_call_is_not_that_of_the_next(mover: MoverProcess) -> None:
    with pytest.raises(MoverBroken):
        ask(mover, LATE, "first", timeout_s=0.05)
    ScriptedMover.may_answer.set()
    assert ScriptedMover.answered.acquire(timeout=20.0), "the late answer is on its way"
    for n in range(2 * LANES):
        assert ask(mover, f"{n}").mask == f"{n}".encode()


def test_a_call_that_was_interrupted_leaves_its_answer_to_nobody(
    mover: MoverProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Lane, "receive", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ask(mover, "first")
    assert ScriptedMover.answered.acquire(timeout=20.0)
    for n in range(2 * LANES):
        assert ask(mover, f"{n}").mask == f"{n}".encode()


def test_calls_in_flight_from_many_threads_get_their_own_answers(mover: MoverProcess) -> None:
    wrong: list[str] = []

    def call(thread: int) -> None:
        for n in range(50):
            said = f"{thread}-{n}"
            try:
                late = n == 25 and thread < 2
                answer = ask(mover, *([LATE] if late else []), said, timeout_s=0.05 if late else 20.0)
            except (MoverBroken, PoolUnavailable):
                ScriptedMover.may_answer.set()
                continue
            if answer.mask != said.encode():
                wrong.append(said)

    threads = [threading.Thread(target=call, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
