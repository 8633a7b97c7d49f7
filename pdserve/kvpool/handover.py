"""What a node passes to the program that replaces it in the same process (`pdserve pool upgrade`).

`exec` keeps the process: its id, parent, session, output and environment; so supervisors and containers see
nothing. Of its files it keeps those passed on: the listening sockets, in whose queues clients wait meanwhile,
and the lock on the arena's directory. The pages stay where they are, in files; the new program takes them
over as after a crash.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from pathlib import Path
from typing import Final, NoReturn

import msgspec

logger = logging.getLogger(__name__)

ENVIRONMENT: Final = "PDSERVE_POOL_HANDOVER"


class Handover(msgspec.Struct, frozen=True, kw_only=True):
    """Descriptors by use. `pid`: whom they are for, since children inherit the environment too. `since_s`:
    when the node stopped answering, of time.monotonic(), which goes on.
    """

    pid: int
    lock_fd: int
    listening: dict[str, list[int]]  # by address
    since_s: float


def received() -> Handover | None:
    """What this process was passed; None if it was started in the ordinary way. Can be asked once."""
    text = os.environ.pop(ENVIRONMENT, "")
    try:
        handover = msgspec.json.decode(text, type=Handover) if text else None
    except msgspec.MsgspecError:
        return None
    if handover is None or handover.pid != os.getpid():
        return None
    for fd in [handover.lock_fd, *(fd for fds in handover.listening.values() for fd in fds)]:
        os.set_inheritable(fd, False)
    return handover


def replace_process(handover: Handover) -> NoReturn:
    """Start this process's command anew, from whatever is installed now. Raises OSError."""
    kept = {handover.lock_fd, *(fd for fds in handover.listening.values() for fd in fds)}
    for entry in list(Path("/proc/self/fd").iterdir()):
        fd = int(entry.name)
        if fd > 2:
            with contextlib.suppress(OSError):  # the one of this listing
                os.set_inheritable(fd, fd in kept)
    os.environ[ENVIRONMENT] = msgspec.json.encode(handover).decode()
    logger.info("process %d goes on as: %s", os.getpid(), " ".join(command()))
    for handler in logging.getLogger().handlers:
        handler.flush()
    os.execv(sys.executable, command())


def command() -> list[str]:
    """This process's command line."""
    return [sys.executable, *sys.orig_argv[1:]]


def gap_ms(handover: Handover) -> float:
    """How long nobody answered."""
    return (time.monotonic() - handover.since_s) * 1000
