"""Torch's key-value store of a worker's ranks listens on loopback only.

Rank 0 of a process group serves a `TCPStore`, through which the ranks find each other. Torch binds it to all
interfaces whatever its address, and asks nobody who he is. SGLang names the worker's own address. Where all
ranks of a worker are on one host, the store is served and asked at 127.0.0.1 instead. Gloo and NCCL, whose
sockets follow the interface, are told to use loopback by `device.ONE_HOST_ENV`. Ranks on several hosts need
`engine.trusted_network`.
"""

from __future__ import annotations

import importlib
import socket
from typing import Any, Final

LOOPBACK: Final = "127.0.0.1"
BACKLOG: Final = 2048  # as torch has
_MARK: Final = "_pdserve_is_ours"


def install() -> None:
    """Make the stores of this process so; again is a no-op. Imports torch."""
    distributed = importlib.import_module("torch.distributed")
    rendezvous = importlib.import_module("torch.distributed.rendezvous")
    if not getattr(distributed.TCPStore, _MARK, False):
        local = local_store(distributed.TCPStore)
        for module in (distributed, rendezvous):
            setattr(module, "TCPStore", local)  # noqa: B010  a class is replaced, which types do not allow


def local_store(store: type[Any]) -> type[Any]:
    """A `TCPStore` that is served at loopback, whatever address it is given."""

    class LocalStore(store):  # type: ignore[misc]
        def __init__(
            self,
            host_name: str,
            port: int,
            world_size: int | None = None,
            is_master: bool = False,
            **more: Any,
        ) -> None:
            if is_master:
                more["master_listen_fd"] = _listen(port)
            super().__init__(LOOPBACK, port, world_size, is_master, **more)

    setattr(LocalStore, _MARK, True)
    made: type[Any] = LocalStore
    return made


def _listen(port: int) -> int | None:
    """A listening socket's descriptor. None: the port is taken, by a store of this process that the new one
    shares, or by another program, which torch then reports.
    """
    try:
        return socket.create_server((LOOPBACK, port), backlog=BACKLOG).detach()
    except OSError:
        return None
