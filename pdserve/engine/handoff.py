"""The direct hand-off: SGLang's own transfer of a prompt's KV, from a prefill worker to a decode worker.

The two workers get a request at the same time. The decode worker asks the prefill worker's bootstrap port
where that worker's ranks are, and sends them the addresses of its KV memory. They write into that memory. The
pool remains: pages of prompts and answers go there, and are read from there, as without it.

A worker in SGLang's decode mode computes no prompt: each of its requests needs a prefill worker.
"""

from __future__ import annotations

import importlib
import os
from ipaddress import ip_address
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from pdserve.engine.config import Role
from pdserve.engine.device import Device
from pdserve.errors import ConfigError, StartupError

CPU_ENV: Final = {
    "MC_FORCE_TCP": "1",
    "MOONCAKE_PROTOCOL": "tcp",
    "SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX": "0",
}
"""Mooncake looks for RDMA otherwise, and SGLang sends a cached prefix early with the help of a CUDA event."""
_LIBRARIES: Final = {
    "mooncake": ("mooncake.engine", "mooncake-transfer-engine"),
    "nixl": ("nixl._api", "nixl"),
}
"""Module and package."""
HOST_ENV: Final = "SGLANG_HOST_IP"
"""The address of this host at which SGLang's ranks and the transfer are reached."""


class DirectConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """SGLang's own transfer between workers (`handoff = "direct"`)."""

    transfer: Literal["mooncake", "nixl"] = "mooncake"
    """The library that moves KV between workers; on CPU only mooncake works, over TCP."""
    bootstrap_port: Annotated[int, Meta(ge=1, le=65535)] = 8998
    """Port of a prefill worker, on its host address, at which decode workers learn where its ranks are. It
    takes no token.
    """
    trusted_network: bool = False
    """All who reach this host are trusted: the ports of the transfer take no token, and let whoever reaches
    them read and write the worker's KV memory.
    """


def check_direct(config: DirectConfig, role: Role, device: Device, *, host_memory: str) -> None:
    """Raises ConfigError for a direct hand-off that cannot work or that was not asked for knowingly.
    StartupError: its library is missing.
    """
    if role in ("agg", "elastic"):
        raise ConfigError(
            'handoff = "direct" is for prefill and decode workers: SGLang has one mode for each, and an '
            f"{'aggregated' if role == 'agg' else role} worker serves both"
        )
    if not config.trusted_network:
        raise ConfigError(
            'handoff = "direct" opens ports on all interfaces that take no token, and whoever reaches them '
            "reads and writes the worker's KV memory: set direct.trusted_network = true if all are trusted"
        )
    if role == "decode" and host_memory == "buffer_only":
        raise ConfigError(
            'engine.hicache_host_memory_mode = "buffer_only" and handoff = "direct" exclude each other on '
            'decode workers: take "cache"'
        )
    if device == "cpu" and config.transfer != "mooncake":
        raise ConfigError(f"direct.transfer: {config.transfer!r} needs a GPU; on CPU use mooncake")
    _check_library(config, device)


def _check_library(config: DirectConfig, device: Device) -> None:
    module, package = _LIBRARIES[config.transfer]
    try:
        importlib.import_module(module)
    except ImportError as error:
        package += "-non-cuda" if device == "cpu" else ""
        raise StartupError(
            f"direct.transfer: {config.transfer} cannot be loaded ({error}): pip install {package}; Mooncake "
            "needs libibverbs, on Debian apt-get install libibverbs1"
        ) from error


def direct_argv(config: DirectConfig, role: Role) -> list[str]:
    """SGLang's words for a worker of this role."""
    argv = [
        *("--disaggregation-mode", role),
        *("--disaggregation-transfer-backend", config.transfer),
        *("--disaggregation-bootstrap-port", str(config.bootstrap_port)),
    ]
    if role == "decode":
        # without it, SGLang's decode mode keeps no pages: none would be reused, and none written back
        argv += ["--disaggregation-decode-enable-radix-cache"]
    return argv


def prepare_direct(host: str, device: Device) -> None:
    """Set the environment of this process and of its children. What a user set stays."""
    if device == "cpu":
        for name, value in CPU_ENV.items():
            os.environ.setdefault(name, value)
    if _is_one_address(host):  # else SGLang takes that of a network interface
        os.environ.setdefault(HOST_ENV, host)


def _is_one_address(host: str) -> bool:
    try:
        return not ip_address(host).is_unspecified
    except ValueError:
        return False
