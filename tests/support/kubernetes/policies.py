"""NetworkPolicies of rendered files, on the switch of a network of pods. They are about who opens a
connection, so the packets that open one are filtered. A pod's own host always reaches it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

Json = dict[str, Any]
OPENING: Final = "tcp flags & (syn | ack) == syn"


def rules(
    policies: Iterable[Json], labels: Mapping[str, Mapping[str, str]], addresses: Mapping[str, str], node: str
) -> str:
    """For `nft -f`. `labels`, `addresses`: of each pod; `node`: the address of all pods' host."""
    listed = list(policies)
    lines = [*_direction("ingress", listed, labels, addresses, node)]
    lines += _direction("egress", listed, labels, addresses, node)
    return "\n".join(lines)


def _direction(
    way: str,
    policies: list[Json],
    labels: Mapping[str, Mapping[str, str]],
    addresses: Mapping[str, str],
    node: str,
) -> Iterator[str]:
    """A pod that a policy selects is closed to all that no policy allows. nft asks the chains one by one."""
    own, other, peers = ("daddr", "saddr", "from") if way == "ingress" else ("saddr", "daddr", "to")
    chain = f"rule bridge policies {way}"
    priority = 10 if way == "ingress" else 20
    yield "add table bridge policies"
    yield f"add chain bridge policies {way} {{ type filter hook forward priority {priority}; }}"
    yield f"add {chain} ip {other} {node} accept"
    for pod, address in addresses.items():
        selecting = [one["spec"] for one in policies if way.capitalize() in one["spec"]["policyTypes"]]
        selecting = [spec for spec in selecting if _selects(spec["podSelector"], labels[pod])]
        for allowed in (rule for spec in selecting for rule in spec.get(way, ())):
            words = [f"ip {own} {address}"]
            if peers in allowed:
                found = [
                    addresses[name]
                    for name in addresses
                    if any(_selects(peer["podSelector"], labels[name]) for peer in allowed[peers])
                ]
                words.append(f"ip {other} {{ {', '.join(found)} }}")
                if not found:
                    continue
            if open_ports := [str(port["port"]) for port in allowed.get("ports", ())]:
                words.append(f"tcp dport {{ {', '.join(open_ports)} }}")
            yield f"add {chain} {' '.join(words)} accept"
        if selecting:
            yield f"add {chain} ip {own} {address} {OPENING} drop"


def _selects(selector: Json, labels: Mapping[str, str]) -> bool:
    assert selector.keys() <= {"matchLabels"}
    return bool(selector.get("matchLabels", {}).items() <= labels.items())
