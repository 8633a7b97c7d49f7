"""Torch's key-value store of a worker's ranks listens on loopback only.

Rank 0 of a process group serves a `TCPStore`, through which the ranks find each other. Torch binds it to all
interfaces whatever its address, and asks nobody who he is. SGLang names the worker's own address. Where all
ranks of a worker are on one host, the store is served and asked at 127.0.0.1 instead. Gloo and NCCL, whose
sockets follow the interface, are told to use loopback by `device.ONE_HOST_ENV`. Ranks on several hosts need
`engine.trusted_network`.

SGLang chooses the store's port before it starts the ranks, and rank 0 binds it half a minute later. Any
program could take it meanwhile, and does on a host that starts many. So the process that chooses the port
claims it: a socket is bound to it, and allows others to bind it only then (SO_REUSEPORT, which Linux grants
to processes of the same user). The claim does not listen, so connections reach the store alone.
"""

from __future__ import annotations

import importlib
import socket
from typing import Any, Final

from pdserve.sglang_places import places

PLACES: Final = (
    *places("sglang.srt.server_args", "PortArgs.init_new uses get_free_port_below_ephemeral"),
    *places(
        "sglang.srt.managers.data_parallel_controller",
        "DataParallelController.launch_dp_schedulers uses bind_port",
    ),
)

LOOPBACK: Final = "127.0.0.1"
BACKLOG: Final = 2048  # as torch has
_MARK: Final = "_pdserve_is_ours"
_ATTEMPTS: Final = 64  # as SGLang has


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


def claim_ports() -> None:
    """Claim, until this process ends, each port that SGLang chooses in it from now on for a store; again is a
    no-op.
    """
    server_args = importlib.import_module("sglang.srt.server_args")
    if getattr(server_args.get_free_port_below_ephemeral, _MARK, False):
        return
    controller = importlib.import_module("sglang.srt.managers.data_parallel_controller")
    choose, hold = server_args.get_free_port_below_ephemeral, controller.bind_port
    claims: dict[int, socket.socket] = {}

    def chosen() -> int:
        for _ in range(_ATTEMPTS):
            port = int(choose())
            if (claim := claimed(port)) is not None:
                claims[port] = claim
                return port
        raise OSError(f"no free port for the ranks' store after {_ATTEMPTS} attempts")

    def held(port: int) -> Any:
        """The controller holds each rank's port until all are chosen: a claimed one needs no second hold."""
        return socket.socket() if port in claims else hold(port)

    setattr(chosen, _MARK, True)
    server_args.get_free_port_below_ephemeral = chosen  # type: ignore[attr-defined]
    controller.bind_port = held  # type: ignore[attr-defined]


def claimed(port: int) -> socket.socket | None:
    """A socket that keeps the port from all but stores of this user; None: it is taken."""
    claim = socket.socket()
    try:
        claim.bind((LOOPBACK, port))
    except OSError:
        claim.close()
        return None
    claim.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # only now: a second claim fails
    return claim


def _listen(port: int) -> int | None:
    """A listening socket's descriptor. None: the port is taken, by a store of this process that the new one
    shares, or by another program, which torch then reports.
    """
    with socket.socket() as probe:
        if probe.connect_ex((LOOPBACK, port)) == 0:  # a second listener would be let in beside it
            return None
    try:
        return socket.create_server((LOOPBACK, port), backlog=BACKLOG, reuse_port=True).detach()
    except OSError:
        return None
