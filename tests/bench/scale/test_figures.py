"""`python -m benchmarks scale`: its figures are of the real messages and code, and all of them have a meaning."""

from __future__ import annotations

from benchmarks.scale.figure import KINDS
from benchmarks.scale.pool import calm_state, node, pool_figures
from benchmarks.scale.router import router_figures
from pdserve.kvpool.cluster.membership import Cluster


def test_every_figure_has_a_meaning_and_every_meaning_a_figure() -> None:
    found = {figure.what: figure for figure in (*pool_figures(4), *router_figures(8))}
    assert found.keys() == KINDS.keys()
    assert all(figure.count == (4 if KINDS[what].of == "nodes" else 8) for what, figure in found.items())
    assert all(figure.value > 0 for figure in found.values())


def test_a_calm_state_is_one_that_nodes_believe_and_agree_on() -> None:
    state = calm_state(5)
    nodes = [Cluster("pool", node(i), 1, 1) for i in range(3)]
    for one in nodes:
        one.receive(state)
    assert all(len(one.members) == 5 for one in nodes)
    for one in nodes:
        for other in nodes:
            one.receive(other.state)
    assert len({one.digest for one in nodes}) == 1
