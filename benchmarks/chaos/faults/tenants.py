"""Faults that tenants make: quotas overrun, memory filled, namespaces dropped, tokens that are not theirs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from typing import Final

import numpy as np

from benchmarks.chaos import pages as p
from benchmarks.chaos.faults.direct import Direct, ask
from benchmarks.chaos.faults.outcome import LeftOut
from benchmarks.chaos.faults.timing import disturbance
from benchmarks.chaos.field import Field
from benchmarks.chaos.moving import GEOMETRY, NAMESPACE
from benchmarks.chaos.plan import Fault
from benchmarks.chaos.records import Dropped, Intruded, Lost, Overshot
from benchmarks.chaos.worker import READ_TOKEN, WRITE_TOKEN
from benchmarks.dice import Dice
from benchmarks.node_processes import NodeProcess
from benchmarks.stores import BenchError
from pdserve.errors import PoolError, PoolRefused
from pdserve.kvpool.client.client import PoolClient
from pdserve.kvpool.protocol import messages as m
from pdserve.kvpool.protocol.cluster_messages import (
    Drain,
    ListOwned,
    ListPages,
    NamespaceSettings,
    PutNamespace,
)
from pdserve.kvpool.protocol.page_bytes import Bytes1D
from pdserve.kvpool.transports.control import ControlChannel, make_hello
from pdserve.kvpool.transports.shm import host_id
from pdserve.tokens import digest

GONE_WITHIN_S: Final = 1.0  # R5
READ_AFTER_DROP_S: Final = 2.5
DROPPED_PAGES: Final = 48
WRITE_BATCH: Final = 32
POLL_S: Final = 0.05
QUOTA_POLL_S: Final = 0.02
QUOTA_BYTES: Final = 2 << 20
QUOTA_S: Final = 1.0
QUOTA_WITHIN_S: Final = 20.0  # a node may be away
QUOTA_WRITERS: Final = 2


def drop(field: Field, fault: Fault) -> None:
    """Fill a namespace, drop it, and go on reading with the client that filled it."""
    name = f"dropped-{fault.draw:08x}"
    dice = Dice(name)
    keys = [p.any_key(dice) for _ in range(DROPPED_PAGES)]
    whole = [p.content(key, sum(p.SHAPES[0])) for key in keys]
    with closing(PoolClient(field.direct(), name, GEOMETRY, name="chaos-drop")) as client:
        if not all(client.put(keys, [(page,) for page in whole])):
            raise LeftOut("not all pages could be stored")
        ask(field.nodes[fault.node], lambda request_id: m.DropNamespace(request_id, name), m.Done)
        at_s = time.monotonic()
        reads = hits = 0
        found: list[tuple[Bytes1D]] = [(np.empty_like(page),) for page in whole]
        while time.monotonic() < at_s + READ_AFTER_DROP_S:
            late = time.monotonic() > at_s + GONE_WITHIN_S
            got = client.get(keys, found)
            if late:
                reads += len(keys)
                hits += sum(got)
            time.sleep(POLL_S)
        field.note(Dropped(at_s, reads, hits))


def quota(field: Field, fault: Fault) -> None:
    """Writers far beyond what fits, and a client that reserves all it can get and holds it; the nodes are
    asked again and again what the namespace has.
    """
    name = f"quota-{fault.draw:08x}"
    settings = NamespaceSettings(quota_bytes=QUOTA_BYTES)
    for node in field.nodes:  # each by itself: news take a moment to go around
        ask(
            node, lambda request_id: PutNamespace(request_id, name, settings), m.Done, within_s=QUOTA_WITHIN_S
        )
    at_s = time.monotonic()
    over_bytes = samples = held_bytes = 0
    try:
        with (
            _writing(field, name, str(fault.draw), QUOTA_WRITERS),
            Direct(field.nodes[fault.node], name) as own,
        ):
            while time.monotonic() < at_s + QUOTA_S:
                held_bytes += _reserve(own, Dice(name, held_bytes)) if samples else 0
                over_bytes = max(over_bytes, held_bytes - QUOTA_BYTES)
                for has_bytes in _slot_bytes(field.nodes, name):
                    over_bytes = max(over_bytes, has_bytes - QUOTA_BYTES)
                    samples += has_bytes > 0
                time.sleep(QUOTA_POLL_S)
    finally:
        field.note(Overshot(at_s, over_bytes, samples, held_bytes))
        with suppress(PoolError):
            ask(field.nodes[fault.node], lambda request_id: m.DropNamespace(request_id, name), m.Done)


def _reserve(own: Direct, dice: Dice) -> int:
    """Reserve pages that are never written; how many bytes were granted."""
    keys = [p.any_key(dice) for _ in range(WRITE_BATCH)]
    reserved = own.ask(lambda request_id: m.Reserve(request_id, own.namespace, keys, list(p.SHAPES[0])))
    if not isinstance(reserved, m.Reserved):
        return 0
    return sum(grant.status == m.GRANTED for grant in reserved.grants) * sum(p.SHAPES[0])


def _slot_bytes(nodes: list[NodeProcess], name: str) -> Iterator[int]:
    """What the namespace takes on each node that answers."""
    for node in nodes:
        with suppress(PoolError):  # another fault's doing
            yield from (one.slot_bytes for one in node.status().namespaces if one.name == name)


@contextmanager
def _writing(field: Field, name: str, seed: str, writers: int) -> Iterator[None]:
    """Threads write new pages meanwhile, as fast as they can."""
    enough = threading.Event()
    threads = [
        threading.Thread(target=_write_on, args=(field, name, f"{seed}/{index}", enough))
        for index in range(writers)
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        enough.set()
        for thread in threads:
            thread.join()


def _write_on(field: Field, name: str, seed: str, enough: threading.Event) -> None:
    dice = Dice("writer", seed)
    with closing(PoolClient(field.direct(), name, GEOMETRY, name="chaos-writer")) as client:
        while not enough.is_set():
            keys = [p.any_key(dice) for _ in range(WRITE_BATCH)]
            client.put(keys, [(p.content(key, sum(p.SHAPES[0])),) for key in keys])


def pressure(field: Field, fault: Fault) -> None:
    """Write into another namespace until everything that can be evicted was; then make room again."""
    with closing(PoolClient(field.direct(), "pressure", GEOMETRY, name="chaos-pressure")) as client:
        with disturbance(field, "pressure", ""):
            with _writing(field, "pressure", str(fault.draw), 1):
                field.stop.wait(fault.for_s)
            if not client.clear():
                raise BenchError("no page was written into the other namespace")
        field.note(Lost(time.monotonic()))


def intrude(field: Field, fault: Fault) -> None:
    """Ask for everything that needs a token, without one, with a wrong one, with the digest of a right one,
    and with one that gives less.
    """
    node = field.nodes[fault.node]
    refused = admitted = 0
    let_in: list[str] = []
    with Direct(node) as own:
        number = own.namespace
    for token, may_read in (("", False), ("wrong", False), (digest(WRITE_TOKEN), False), (READ_TOKEN, True)):
        for make in _requests(number, Dice("intrude", fault.draw)):
            reply = _answer(node, token, make)
            if isinstance(reply, m.Fault) and reply.code == "access_denied":
                refused += 1
            elif may_read and isinstance(reply, m.Opened | m.Got | m.Present):
                admitted += 1
            elif reply is not None:
                asked, got = type(make(0)).__name__, getattr(reply, "message", type(reply).__name__)
                let_in.append(f"{asked} with {token[:13] or 'no token'}: {got}")
    field.note(Intruded(time.monotonic(), node.name, refused, let_in, admitted))


def _answer(node: NodeProcess, token: str, make: Callable[[int], m.Request]) -> m.Reply | None:
    """Of a connection of its own, or why there is none; None when the node went away."""
    deadline = time.monotonic() + 2.0
    try:
        hello = make_hello("chaos-intruder", host_id(), "shm", token)
        channel = ControlChannel.connect(node.address, hello, deadline)
    except PoolRefused as error:
        return m.Fault(1, "access_denied", str(error))
    except PoolError:
        return None
    try:
        return channel.call(make(1), deadline)
    except PoolError:
        return None
    finally:
        channel.close()


def _requests(number: int, dice: Dice) -> list[Callable[[int], m.Request]]:
    """One of each kind that needs a right in the namespace, or on the node."""
    keys, segments = [p.any_key(dice)], list(p.SHAPES[0])
    return [
        lambda request_id: m.OpenNamespace(request_id, NAMESPACE, GEOMETRY),
        lambda request_id: m.Exists(request_id, number, keys),
        lambda request_id: m.Get(request_id, number, keys, segments),
        lambda request_id: m.Reserve(request_id, number, keys, segments),
        lambda request_id: m.Discard(request_id, number, keys, [1]),
        lambda request_id: m.Clear(request_id, number),
        lambda request_id: m.DropNamespace(request_id, NAMESPACE),
        lambda request_id: PutNamespace(request_id, NAMESPACE, NamespaceSettings()),
        lambda request_id: ListPages(request_id, NAMESPACE, 0, 1),
        lambda request_id: ListOwned(request_id, number, "node0", 1, 0, 1),
        Drain,
    ]
