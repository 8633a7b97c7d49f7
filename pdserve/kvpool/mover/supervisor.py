"""Keeps a page mover running, and ends one that does not answer.

A mover that failed is dead before anyone goes on: SIGKILL, and a wait for its end. Only then is it certain
that it writes into the host pool no more. A thread starts the next one, after a pause that doubles with each
failure in a row.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import msgspec

from pdserve.errors import PoolUnavailable, StartupError
from pdserve.kvpool.mover.lane import Lane
from pdserve.kvpool.mover.messages import Answer, Call, Failed, Start, Started, decode_answer, encode

logger = logging.getLogger(__name__)

LANES: Final = 8  # SGLang calls from four threads
START_TIMEOUT_S: Final = 30.0  # a machine under load; loading UCX takes a second
END_TIMEOUT_S: Final = 5.0  # until a killed process is gone
STEADY_S: Final = 30.0  # a mover that lived this long did not fail in a row
FIRST_PAUSE_S: Final = 0.1
MAX_PAUSE_S: Final = 10.0
MAX_DOUBLINGS: Final = 7


class MoverBroken(PoolUnavailable):
    """The mover does not answer as it should, and must be ended."""


@dataclass(slots=True)
class Pauses:
    """The pause before the next start. Pure."""

    failures: int = 0  # in a row

    def after(self, lived_s: float) -> float:
        """The pause after a mover that lived this long; 0 for one that could not start."""
        self.failures = 1 if lived_s >= STEADY_S else self.failures + 1
        return min(MAX_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(self.failures - 1, MAX_DOUBLINGS))


class MoverProcess:
    """One running mover. Thread-safe."""

    def __init__(self, start: Callable[[list[int]], Start]) -> None:
        """`start`: the first message for these descriptors of lanes. Raises StartupError."""
        self._life, life = Lane.pair()
        pairs = [Lane.pair() for _ in range(LANES)]
        theirs = [life, *(sock for _, sock in pairs)]
        first = start([sock.fileno() for sock in theirs[1:]])
        given = [sock.fileno() for sock in theirs]
        given += [fd for part in first.parts.values() for fd, _ in part.pages.memory]
        self._idle = [lane for lane, _ in pairs]  # taken and given back by single steps of the interpreter
        self._numbers = itertools.count(1)  # of calls
        self._ended = False
        self.started_s = time.monotonic()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "pdserve.kvpool.mover", str(life.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=given,
            )
        except OSError as error:
            self._close_lanes()
            raise StartupError(f"the page mover cannot be started: {error}") from error
        finally:
            for sock in theirs:
                sock.close()
        self._greet(first)

    @property
    def pid(self) -> int:
        return self._process.pid

    def call(self, call: Call, timeout_s: float) -> Answer:
        """The mover's answer. Raises PoolUnavailable (it is busy) and MoverBroken."""
        try:
            lane = self._idle.pop()
        except IndexError:
            raise PoolUnavailable("all lanes to the page mover are busy") from None
        whole = False
        try:
            answer = decode_answer(lane.call(encode(call, next(self._numbers)), timeout_s))
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            raise MoverBroken(f"the page mover failed: {error}") from error
        else:
            whole = True
            return answer
        finally:
            if whole:
                self._idle.append(lane)
            else:  # its answer may come late, and would be the next call's
                lane.close()
            if self._ended:
                self._close_lanes()

    def end(self) -> None:
        """Kill it, and return when it is gone. Idempotent."""
        self._process.kill()
        self._ended = True
        try:
            self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:  # it hangs in the kernel, and runs no code of ours any more
            logger.exception("the page mover %d was killed and is still there", self.pid)
        self._close_lanes()

    def _greet(self, first: Start) -> None:
        try:
            answer = decode_answer(self._life.call(encode(first), START_TIMEOUT_S))
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            self.end()
            raise StartupError(f"the page mover does not start: {error}") from error
        if not isinstance(answer, Started):
            self.end()
            text = answer.text if isinstance(answer, Failed) else str(answer)
            raise StartupError(f"the page mover does not start: {text}")

    def _close_lanes(self) -> None:
        """Close what no call uses; each call closes its own lane."""
        self._life.close()
        with contextlib.suppress(IndexError):
            while True:
                self._idle.pop().close()


class MoverSupervisor:
    """The current mover, if there is one. Thread-safe."""

    def __init__(self, start: Callable[[list[int]], Start]) -> None:
        """Starts the first mover. Raises StartupError."""
        self._start = start
        self._pauses = Pauses()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._current: MoverProcess | None = MoverProcess(start)
        self.restarts = 0

    @property
    def pid(self) -> int | None:
        """The current mover's process id; None while there is none."""
        current = self._current
        return current.pid if current is not None else None

    def call(self, call: Call, timeout_s: float) -> Answer:
        """The mover's answer. Raises PoolUnavailable: there is no mover, or there was one that did not
        answer; it is dead then.
        """
        mover = self._current
        if mover is None:
            raise PoolUnavailable("the page mover is being started again")
        try:
            return mover.call(call, timeout_s)
        except MoverBroken as error:
            self._replace(mover, str(error))
            raise

    def close(self) -> None:
        """End the mover. Idempotent."""
        self._closed.set()
        with self._lock:
            mover, self._current = self._current, None
        if mover is not None:
            mover.end()

    def _replace(self, mover: MoverProcess, reason: str) -> None:
        with self._lock:
            first = self._current is mover
            if first:
                self._current = None
        mover.end()  # also where another thread replaces it: it must be dead before this call returns
        if first and not self._closed.is_set():
            pause_s = self._pauses.after(time.monotonic() - mover.started_s)
            logger.warning("%s; it is started again in %.1f s, pages are missed until then", reason, pause_s)
            threading.Thread(target=self._restart, args=(pause_s,), name="mover-restart", daemon=True).start()

    def _restart(self, pause_s: float) -> None:
        while not self._closed.wait(pause_s):
            try:
                mover = MoverProcess(self._start)
            except StartupError as error:
                pause_s = self._pauses.after(0.0)
                logger.warning("%s; the next try is in %.1f s", error, pause_s)
                continue
            with self._lock:
                self.restarts += 1
                if not self._closed.is_set():
                    self._current = mover
                    return
            mover.end()
            return
