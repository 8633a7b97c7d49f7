"""The clients of client_machine under views that change: pages of others, replicas, pushes with any end."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from pdserve.kvpool.cluster.ring import Ring
from pdserve.kvpool.core import events as ev
from pdserve.kvpool.protocol import messages as m
from tests.support.kvpool.client_machine import KEYS, TIMES, Clients, Page
from tests.support.kvpool.node_model import KIB, answers, commit, key

NODES = [m.NodeAddress(f"n{i}", "") for i in range(4)]


class ClientsOfMany(Clients):
    """Clients of one of several nodes. What they hold is kept whatever the view says; what nobody holds and
    the view gives to another node goes once the view is stable.
    """

    @initialize()
    def start(self) -> None:
        self.pushes: list[ev.PushPages] = []  # under way
        super().start()
        self.epoch = 0
        self.ring = Ring([])
        self.node.do(ev.Connected(ev.LOCAL, "shm", "this node", 0, peer=True))
        self.node.do(ev.Connected(99, "none", "n1", 0, peer=True))

    @rule(nodes=st.sets(st.integers(0, 3), min_size=1), stable=st.booleans(), same=st.booleans())
    def view(self, nodes: set[int], stable: bool, same: bool) -> None:
        if not same or not self.epoch:
            self.epoch += 1
            self.ring = Ring([NODES[i] for i in nodes], self.epoch)
        self.act(self.node.do(ev.ViewChanged(self.ring, stable)))

    def waits_to_read(self, namespace: int, k: int) -> bool:
        return key(k) in self.node.state.store.index.namespace(namespace).writing

    @rule(ns=st.integers(0, 1), keys=KEYS, ok=st.booleans())
    def replica(self, ns: int, keys: list[int], ok: bool) -> None:
        namespace = self.namespaces[ns]
        request = m.Reserve(5, namespace, [key(k) for k in keys], [4 * KIB], replica=True)
        actions = self.node.send(ev.LOCAL, request)
        self.act(actions)
        [reply] = answers(actions, ev.LOCAL)
        assert isinstance(reply, m.Reserved)
        granted = [grant for grant in reply.grants if grant.status == m.GRANTED]
        for k, grant in zip(keys, reply.grants, strict=True):
            if ok and grant.status == m.GRANTED:
                self.pages[namespace, k] = Page(grant.slot, grant.sequence, 7, self.node.now_s)
                self.waits_for(namespace, k)
        if granted and ok:
            self.act(self.node.send(ev.LOCAL, commit(5, *granted)))
        elif granted:
            self.node.abort(ev.LOCAL, *granted)

    def act(self, actions: list[ev.Action]) -> list[ev.Action]:
        """Other nodes have no page that is fetched, and take what clients write."""
        self.pushes += [one for one in actions if isinstance(one, ev.PushPages) and not one.written]
        actions = [*super().act(actions)]
        for one in list(actions):
            count = len(getattr(one, "keys", ()))
            if isinstance(one, ev.FetchPages):
                ended = ev.PagesFetched(one, bytes([ev.GONE] * count), [0] * count, [0.0] * count)
                actions += self.act(self.node.do(ended))
            elif isinstance(one, ev.PushPages) and one.written:
                actions += self.act(self.node.do(ev.PagesPushed(one, bytes([ev.TAKEN] * count), count)))
        return actions

    @rule(seconds=TIMES, end=st.sampled_from([ev.TAKEN, ev.TAKEN, ev.LATER, ev.NO_ROOM, ev.GONE, ev.FAILED]))
    def pushed(self, seconds: float, end: int) -> None:
        """All pushes under way end; others begin."""
        ended, self.pushes = self.pushes, []
        for push in ended:
            self.act(self.node.do(ev.PagesPushed(push, bytes([end] * len(push.keys)))))
        self.pass_time(seconds)
        self.node.state.sharding.handover.check()
        for push in self.pushes if not ended else ():
            assert push.replica or all(self.ring.owner(k).node == push.node for k in push.keys)

    def teardown(self) -> None:
        super().teardown()
        if not getattr(self, "epoch", 0):
            return
        self.node.do(ev.ViewChanged(self.ring, True))
        for _ in range(5):
            self.node.pass_time(50)
        store = self.node.state.store
        left = [store.facts.key[slot] for slot in store.committed_slots(0, 1000).tolist()]
        assert all(k is not None and self.ring.owner(k).node == "n0" for k in left)
        assert len(self.node.state.sharding.replicas) == 0


TestClientsOfMany = ClientsOfMany.TestCase
TestClientsOfMany.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)
