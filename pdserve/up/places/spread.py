"""Which process runs on which of several hosts. Pure.

Pool nodes are spread over the hosts first, then workers to the host with the fewest processes per GPU asked
for. A router runs beside the supervisor, unless `place.hosts` says where. Several are on a host each, as far
as there are hosts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pdserve.errors import StartupError
from pdserve.up.site import Demand


def spread(
    demands: Sequence[Demand],
    gpus: Mapping[str, int],
    own: str,
    before: Mapping[str, str] | None = None,
    *,
    by_number: bool = False,
) -> dict[str, str]:
    """Host by process. `gpus`: of each host, in order; `own`: the supervisor's host; `before`: hosts of
    processes that run already and stay there; `by_number`: workers get the GPUs that they name.

    Raises StartupError: no host is allowed, or none has GPUs enough.
    """
    free = dict(gpus)
    load = dict.fromkeys(gpus, 0.0)
    pools = dict.fromkeys(gpus, 0.0)
    routers = {host: 0.0 if host == own else 0.5 for host in gpus}  # the first one goes to its own
    taken: dict[str, set[int]] = {host: set() for host in gpus}
    chosen: dict[str, str] = {}
    kept = before or {}
    for one in sorted(demands, key=lambda one: one.name not in kept):  # sorted keeps the order of equals
        counted = {"pool": pools, "router": routers}.get(one.role, load)
        host = kept.get(one.name) or _best(one, gpus, free, taken, counted)
        counted[host] += 1
        free[host] -= one.needs.gpus
        taken[host] |= set(one.needs.gpu_numbers) if by_number else set()
        chosen[one.name] = host
    return chosen


def _best(
    one: Demand,
    gpus: Mapping[str, int],
    free: Mapping[str, int],
    taken: Mapping[str, set[int]],
    counted: Mapping[str, float],
) -> str:
    """The host for it. `free`: GPUs; `taken`: numbers of GPUs; `counted`: processes of its kind. Raises
    StartupError.
    """
    allowed = [host for host in gpus if not one.needs.hosts or host in one.needs.hosts]
    fitting = [host for host in allowed if free[host] >= one.needs.gpus]
    if not fitting:
        why = f"{one.needs.gpus} GPUs are free on none of {', '.join(allowed)}" if allowed else "no host fits"
        raise StartupError(f"{one.name}: {why}; the hosts are {', '.join(gpus)}")
    if clash := set(one.needs.gpu_numbers).intersection(*(taken[host] for host in fitting)):
        raise StartupError(
            f"{one.name}: GPU {min(clash)} is given to another worker on each of {', '.join(fitting)}: "
            "name others, or give more hosts"
        )
    fitting = [host for host in fitting if not taken[host] & set(one.needs.gpu_numbers)]
    order = list(gpus)
    return min(fitting, key=lambda host: (counted[host], -free[host], order.index(host)))
