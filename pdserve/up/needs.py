"""What a process asks of the place that runs it: processors, memory, GPUs, and on which hosts. Pure.

On this host `hosts` is checked, and `gpus` chooses GPUs. Other places take all of it into account; by `ssh`
GPUs are named.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from pdserve.errors import ConfigError
from pdserve.sizes import parse_bytes


class Needs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`place` in a process's table."""

    cpus: Annotated[float, Meta(ge=0, description="Processors; 0: not said.")] = 0
    memory: Annotated[
        int | str,
        Meta(description="Memory without a pool node's pages, in bytes or like `64GiB`; 0: not said."),
    ] = 0
    hosts: Annotated[
        list[str], Meta(description="Hosts that it may run on, by name; empty: any. Not for Kubernetes.")
    ] = []
    labels: Annotated[
        dict[str, str],
        Meta(description="Labels that its host must have, in Kubernetes."),
    ] = {}
    gpus: Annotated[int, Meta(ge=0, description="Set by `gpus` of a worker's table.")] = 0
    gpu_numbers: Annotated[
        tuple[Annotated[int, Meta(ge=0)], ...], Meta(description="Set by `gpus` where it is a list.")
    ] = ()

    @property
    def memory_bytes(self) -> int:
        """`memory` as a number."""
        return parse_bytes(self.memory)


NOTHING: Final = Needs()


def read_needs(where: str, place: object, gpus: object) -> Needs:
    """`place` and `gpus` of a table. Raises ConfigError. GPUs given by number count as many as there are."""
    if not isinstance(place, Mapping) or {"gpus", "gpu_numbers"} & place.keys():
        raise ConfigError(f"'{where}.place' must be a table with cpus, memory, hosts and labels")
    numbers: Any = gpus if isinstance(gpus, list) else []
    count: Any = len(numbers) or gpus or 0
    try:
        if isinstance(count, bool):
            raise ValueError("gpus must be a number or a list of numbers")
        needs = msgspec.convert({**place, "gpus": count, "gpu_numbers": numbers}, Needs)
        if needs.memory_bytes < 0:
            raise ValueError("memory must not be negative")
    except (msgspec.ValidationError, ValueError) as error:
        raise ConfigError(f"'{where}.place' or '{where}.gpus': {error}") from None
    return needs
