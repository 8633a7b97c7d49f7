"""Which process runs on which of several hosts. Pure.

Pool nodes are spread over the hosts first, then workers to the host with the fewest processes per GPU asked
for. A router runs beside the supervisor, unless `place.hosts` says where. Several are on a host each, as far
as there are hosts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pdserve.errors import StartupError
from pdserve.up.site import Demand


def spread(demands: Sequence[Demand], gpus: Mapping[str, int], own: str) -> dict[str, str]:
    """Host by process. `gpus`: of each host, in order; `own`: the supervisor's host.

    Raises StartupError: no host is allowed, or none has GPUs enough.
    """
    free = dict(gpus)
    load = dict.fromkeys(gpus, 0.0)
    pools = dict.fromkeys(gpus, 0.0)
    routers = {host: 0.0 if host == own else 0.5 for host in gpus}  # the first one goes to its own
    chosen: dict[str, str] = {}
    for one in demands:
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
        counted = {"pool": pools, "router": routers}.get(one.role, load)
        host = min(fitting, key=lambda host: (counted[host], -free[host], order.index(host)))
        counted[host] += 1
        free[host] -= one.needs.gpus
        chosen[one.name] = host
    return chosen
