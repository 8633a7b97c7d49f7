"""Nodes of membership.py and failure_detector.py in simulated time, with a network that can be cut. A seed
determines the run.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable

from pdserve.kvpool.cluster import failure_detector as d
from pdserve.kvpool.cluster.membership import Cluster, Update
from pdserve.kvpool.protocol.base import NodeAddress
from pdserve.kvpool.protocol.cluster_messages import ClusterState


class SimNode:
    def __init__(self, sim: Sim, name: str, incarnation: int) -> None:
        self.sim = sim
        self.name = name
        self.cluster = Cluster("pool", NodeAddress(name, f"sim:{name}"), incarnation, 100 + int(sim.now_s))
        self.detector = d.Detector(name, sim.timing, sim.now_s)
        self.up = True
        self.paused = False
        self._waiting: list[Callable[[], None]] = []  # what came while paused
        self.deaths: list[tuple[float, str]] = []  # declared by this node

    # what the shell does

    def apply(self, update: Update) -> None:
        if update.members:
            others = [m for m in self.cluster.members.values() if m.node != self.name]
            alive = {m.node: m.version for m in others if m.status <= 1}
            dead = {m.node: m.version for m in others if m.status == 3}
            self.feed(d.Known(alive, dead))
        if self.cluster.settle(self.cluster.epoch) or update.own:
            for member in self.cluster.alive():
                if member.node != self.name:
                    self.send(member.node)

    def feed(self, event: d.Event) -> None:
        for action in self.detector.handle(event, self.sim.now_s):
            match action:
                case d.Ping(node):
                    self.ping(node)
                case d.Sync(node):
                    self.send(node)
                case d.Dead(node, version):
                    self.deaths.append((self.sim.now_s, node))
                    self.apply(self.cluster.declare_dead(node, version))
                case d.Ask(helper, node):
                    self.ask(helper, node)

    def receive(self, sender: str, state: ClusterState) -> None:
        self.feed(d.Heard(sender))
        self.apply(self.cluster.receive(state))

    def call(
        self, node: str, work: Callable[[SimNode], None], ended: Callable[[d.Outcome], None], timeout_s: float
    ) -> None:
        """A request and its answer; `ended` is called once."""
        sim, open_ = self.sim, [True]

        def end(outcome: d.Outcome) -> None:
            if open_[0]:
                open_[0] = False
                self.run(lambda: ended(outcome))

        def arrive() -> None:
            other = sim.nodes.get(node)
            if other is None or not other.up:
                sim.carry(node, self.name, lambda: end("refused"))
                return

            def do() -> None:
                work(other)
                sim.carry(node, self.name, lambda: end("answered"))

            other.run(do)

        sim.carry(self.name, node, arrive)
        sim.after(timeout_s, lambda: end("silent"))

    def ping(self, node: str) -> None:
        state = self.cluster.state

        def work(other: SimNode) -> None:
            other.receive(self.name, state)
            answer = other.cluster.state
            self.sim.carry(node, self.name, lambda: self.run(lambda: self.receive(node, answer)))

        self.call(node, work, lambda how: self.feed(d.PingEnded(node, how)), self.sim.timing.ping_timeout_s)

    def send(self, node: str) -> None:
        state = self.cluster.state

        def arrive() -> None:
            other = self.sim.nodes.get(node)
            if other is not None and other.up:
                other.run(lambda: other.receive(self.name, state))

        self.sim.carry(self.name, node, arrive)

    def ask(self, helper: str, node: str) -> None:
        def work(other: SimNode) -> None:
            def ended(how: d.Outcome) -> None:
                def tell() -> None:
                    self.run(lambda: self.feed(d.Asked(node, helper, how == "answered")))

                self.sim.carry(helper, self.name, tell)

            other.call(node, lambda target: None, ended, self.sim.timing.indirect_timeout_s * 0.8)

        self.call(helper, work, lambda how: None, self.sim.timing.indirect_timeout_s)

    def run(self, work: Callable[[], None]) -> None:
        if self.up and self.paused:
            self._waiting.append(work)
        elif self.up:
            work()

    def tick(self) -> None:
        if not self.up:
            return
        if not self.paused:
            self.feed(d.Tick())
        self.sim.after(self.sim.timing.tick_s, self.tick)

    def resume(self) -> None:
        self.paused = False
        waiting, self._waiting = self._waiting, []
        for work in waiting:
            work()


class Timeline:
    """Simulated time, and what is to happen when. A seed determines the run."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now_s = 0.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def after(self, seconds: float, work: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now_s + seconds, next(self._order), work))

    def run(self, seconds: float) -> None:
        end_s = self.now_s + seconds
        while self._queue and self._queue[0][0] <= end_s:
            self.now_s, _, work = heapq.heappop(self._queue)
            work()
            self.check()
        self.now_s = end_s

    def check(self) -> None:
        """After each thing that happened."""


class Sim(Timeline):
    def __init__(self, names: str, seed: int = 0, timing: d.Timing | None = None) -> None:
        super().__init__(seed)
        self.timing = timing or d.Timing()
        self.cut: set[tuple[str, str]] = set()  # from, to
        self.slow: dict[str, float] = {}  # seconds more to answer
        self.nodes: dict[str, SimNode] = {}
        for name in names:
            self.start(name)
        self.run(2.0)

    def start(self, name: str) -> SimNode:
        node = SimNode(self, name, self.rng.getrandbits(60))
        self.nodes[name] = node
        for seed in [n for n in self.nodes.values() if n is not node and n.up]:
            node.cluster.receive(seed.cluster.state)
            break
        node.apply(Update(members=(node.cluster.me,), own=True))
        self.after(self.rng.random() * self.timing.tick_s, node.tick)
        return node

    def carry(self, sender: str, to: str, work: Callable[[], None]) -> None:
        """Over the network; lost where it is cut when it is sent."""
        if (sender, to) not in self.cut:
            self.after(0.0005 + 0.002 * self.rng.random() + self.slow.get(sender, 0.0), work)

    def run_until(self, condition: Callable[[], bool], limit_s: float) -> float:
        """How long it took."""
        begun_s = self.now_s
        while not condition():
            assert self.now_s - begun_s < limit_s, f"not within {limit_s} s: {self.views()}"
            self.run(0.01)
        return self.now_s - begun_s

    def part(self, one: str, other: str) -> None:
        self.cut |= {(a, b) for a in one for b in other} | {(b, a) for a in one for b in other}

    def views(self) -> dict[str, str]:
        return {
            name: "".join(n.node for n in node.cluster.view.nodes)
            for name, node in self.nodes.items()
            if node.up and not node.paused
        }

    def agree(self, names: str) -> bool:
        """All nodes that run have this ring, and all know the same."""
        running = [node for node in self.nodes.values() if node.up and not node.paused]
        return set(self.views().values()) == {names} and len({n.cluster.digest for n in running}) == 1
