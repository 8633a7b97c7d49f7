"""Which process runs on which of several hosts. Pure.

Pool nodes are spread over the hosts first, then workers to the host with the fewest processes per GPU asked
for. The router runs beside the supervisor, which asks it over loopback.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pdserve.errors import StartupError
from pdserve.up.site import Demand


def spread(
    demands: Sequence[Demand], gpus: Mapping[str, int], own: str, before: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Host by process. `gpus`: of each host, in order; `own`: the supervisor's host; `before`: hosts of
    processes that run already and stay there.

    Raises StartupError: no host is allowed, or none has GPUs enough.
    """
    free = dict(gpus)
    load = dict.fromkeys(gpus, 0)
    pools = dict.fromkeys(gpus, 0)
    chosen: dict[str, str] = {}

    def choose(one: Demand, host: str) -> None:
        counted = pools if one.role == "pool" else load
        counted[host] += one.role != "router"
        free[host] -= one.needs.gpus
        chosen[one.name] = host

    kept = before or {}
    for one in sorted(demands, key=lambda one: one.name not in kept):  # sorted keeps the order of equals
        if one.role == "router" or one.name in kept:
            choose(one, own if one.role == "router" else kept[one.name])
            continue
        allowed = [host for host in gpus if not one.needs.hosts or host in one.needs.hosts]
        fitting = [host for host in allowed if free[host] >= one.needs.gpus]
        if not fitting:
            why = (
                f"{one.needs.gpus} GPUs are free on none of {', '.join(allowed)}"
                if allowed
                else "no host fits"
            )
            raise StartupError(f"{one.name}: {why}; the hosts are {', '.join(gpus)}")
        order = list(gpus)
        counted = pools if one.role == "pool" else load
        choose(one, min(fitting, key=lambda host: (counted[host], -free[host], order.index(host))))
    return chosen
