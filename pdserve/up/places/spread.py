"""Which process runs on which of several hosts. Pure.

Pool nodes are spread over the hosts, and so are workers, by the GPUs that their tables ask for. A router runs
beside the supervisor, unless `place.hosts` says where; further ones run on a host each, as far as there are
hosts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pdserve.errors import StartupError
from pdserve.up.site import Demand


def spread(
    demands: Sequence[Demand], hosts: Sequence[str], own: str, before: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Host by process. `own`: the supervisor's host; `before`: of processes that run already, and stay there.

    Raises StartupError: no host is allowed, or a GPU is named twice on each of them.
    """
    load = dict.fromkeys(hosts, 0.0)
    pools = dict.fromkeys(hosts, 0.0)
    routers = {host: 0.0 if host == own else 0.5 for host in hosts}  # the first one goes to its own
    taken: dict[str, set[int]] = {host: set() for host in hosts}
    chosen: dict[str, str] = {}
    kept = before or {}
    for one in sorted(demands, key=lambda one: one.name not in kept):  # sorted keeps the order of equals
        counted = {"pool": pools, "router": routers}.get(one.role, load)
        host = kept.get(one.name) or _best(one, hosts, taken, counted)
        counted[host] += max(1, one.needs.gpus)
        taken[host] |= set(one.needs.gpu_numbers)
        chosen[one.name] = host
    return chosen


def _best(
    one: Demand, hosts: Sequence[str], taken: Mapping[str, set[int]], counted: Mapping[str, float]
) -> str:
    """The host for it. `taken`: GPUs that tables name; `counted`: what each host has of its kind. Raises
    StartupError.
    """
    allowed = [host for host in hosts if not one.needs.hosts or host in one.needs.hosts]
    if not allowed:
        raise StartupError(f"{one.name}: no host fits; the hosts are {', '.join(hosts)}")
    named = set(one.needs.gpu_numbers)
    if clash := named.intersection(*(taken[host] for host in allowed)):
        raise StartupError(
            f"{one.name}: GPU {min(clash)} is given to another worker on each of {', '.join(allowed)}: "
            "name others, or give more hosts"
        )
    fitting = [host for host in allowed if not taken[host] & named] or allowed
    return min(fitting, key=lambda host: (counted[host], hosts.index(host)))
