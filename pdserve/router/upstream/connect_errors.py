"""Whose fault it is that a connection cannot be opened: the worker's, or this machine's. Pure.

A worker whose port is closed is down. Without a free file descriptor, or while no name server answers, the
router learns nothing about any worker.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator

_OWN_ERRNOS = frozenset(
    (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL, errno.ENETDOWN)
)
_OWN_NAME_ERRORS = frozenset((socket.EAI_AGAIN, socket.EAI_MEMORY, socket.EAI_SYSTEM))


def is_own_fault(error: BaseException) -> bool:
    """This machine could not try: it lacks descriptors, ports or memory, or no name server answers."""
    return any(_is_own(cause) for cause in os_errors(error))


def is_refused(error: BaseException) -> bool:
    """The port is closed: at every address of the worker, the connection was refused."""
    causes = [cause for cause in os_errors(error) if cause.errno is not None]
    return bool(causes) and all(cause.errno == errno.ECONNREFUSED for cause in causes)


def os_errors(error: BaseException) -> Iterator[OSError]:
    """The errors of the operating system that led to `error`, through causes and groups."""
    waiting: list[BaseException | None] = [error]
    seen: set[int] = set()
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, OSError):
            yield one
        if isinstance(one, BaseExceptionGroup):
            waiting += one.exceptions
        waiting += (one.__cause__, one.__context__)


def _is_own(error: OSError) -> bool:
    if isinstance(error, socket.gaierror):
        return error.errno in _OWN_NAME_ERRORS
    return error.errno in _OWN_ERRNOS
