"""LMCache servers of a cluster, by their own `/status`: whether they keep pages in the pool, and reach it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from pdserve.doctor.asking import Asker, NoAnswer
from pdserve.doctor.facts import Finding
from pdserve.kvpool.admin.node_client import TIMEOUT_S

CHECK: Final = "LMCache"
OURS: Final = "pdserve"
"""What `pdserve.integrations.lmcache` calls itself there."""
MAX_ADAPTERS: Final = 64


class Adapter(msgspec.Struct, frozen=True):
    """A tier below LMCache's memory. `namespaces`: those of the pool that it met."""

    type: Annotated[str, Meta(max_length=256)] = ""
    is_healthy: bool = True
    nodes_up: Annotated[int, Meta(ge=0, le=1 << 20)] = 0
    namespaces: dict[str, Any] = {}


class Storage(msgspec.Struct, frozen=True):
    l2_adapters: Annotated[tuple[Adapter, ...], Meta(max_length=MAX_ADAPTERS)] = ()


class Status(msgspec.Struct, frozen=True):
    storage_manager: Storage


def findings(servers: Mapping[str, str]) -> Iterator[Finding]:
    """`servers`: base URLs by name."""
    asker = Asker("")
    for name, url in servers.items():
        try:
            answer = asker.get(f"{url}/status", TIMEOUT_S)
            if answer.status != 200:
                raise NoAnswer(f"{answer.path}: status {answer.status}")
            adapters = answer.decoded(Status).storage_manager.l2_adapters
        except NoAnswer as error:
            says = f"{name} at {url} does not answer: {error}"
            yield Finding(
                CHECK, "fail", says, "start it, or see its log: vLLM computes what it does not find"
            )
        else:
            yield judge(name, adapters)


def judge(name: str, adapters: tuple[Adapter, ...]) -> Finding:
    """Of one server that answered. It connects to the pool with the first page that it stores or looks up."""
    ours = [one for one in adapters if one.type == OURS]
    if not ours:
        return Finding(CHECK, "ok", f"{name} keeps its pages out of the pool")
    if not any(one.namespaces for one in ours):
        return Finding(CHECK, "ok", f"{name} answers, and has had no page for the pool yet")
    nodes_up = max(one.nodes_up for one in ours)
    if not nodes_up:
        change = "see 'pool node' here, and its log: pages stay in its own memory"
        return Finding(CHECK, "fail", f"{name} reaches no pool node", change)
    return Finding(CHECK, "ok", f"{name} reaches {nodes_up} pool node{'s' if nodes_up > 1 else ''}")
