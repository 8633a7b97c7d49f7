"""Namespaces of a node: made, changed, replaced, dropped, learned from others; and who may use them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.kvpool.core import events as ev
from pdserve.kvpool.core import namespace_admin
from pdserve.kvpool.core.namespace_admin import Rules, nearest
from pdserve.kvpool.namespaces import registry
from pdserve.kvpool.namespaces.access import KEPT
from pdserve.kvpool.namespaces.catalog import Namespaces
from pdserve.kvpool.protocol import cluster_messages as c
from pdserve.kvpool.protocol import messages as m
from pdserve.kvpool.protocol.cluster_messages import NamespaceRecord, NamespaceSettings
from pdserve.kvpool.protocol.messages import ALL, READ
from pdserve.security.tokens import digest
from tests.support.kvpool.node_model import KIB, Node, answers, commit, key, opened
from tests.support.kvpool.profiled import calls_of
from tests.support.suite.extended import examples

GUARDED = NamespaceSettings(read_token=digest("r"), write_token=digest("w"), admin_token=digest("a"))
WITH_DEFAULT_WRITE = Rules(admin_token=digest("root"), defaults=NamespaceSettings(write_token=digest("w")))


def put_settings(node: Node, connection: int, name: str, **changes: object) -> m.Reply:
    request = c.PutNamespace(node.next_id(), name, NamespaceSettings(**changes))  # type: ignore[arg-type]
    return reply(node, connection, request)


def reply(node: Node, connection: int, request: m.Request) -> m.Reply:
    return node.ask(connection, request, object)  # type: ignore[return-value]


def fault(node: Node, connection: int, request: m.Request) -> str:
    found = reply(node, connection, request)
    assert isinstance(found, m.Fault), found
    return f"{found.code}: {found.message}"


def record(node: Node, name: str) -> NamespaceRecord:
    found = node.state.namespaces.registry.get(name)
    assert found is not None
    return found


def drop(node: Node, connection: int, name: str) -> int:
    return node.ask(connection, m.DropNamespace(node.next_id(), name), m.Done).count


def learn(node: Node, *records: NamespaceRecord) -> None:
    node.do(ev.RecordsLearned(list(records)))


# --- making


def test_opening_makes_a_namespace_and_tells_the_other_nodes_once() -> None:
    node = Node(rules=Rules(defaults=NamespaceSettings(weight=2.0)))
    a, b = node.connect(), node.connect()
    actions = node.send(a, m.OpenNamespace(1, "ns", {"dtype": "bf16"}))
    made = NamespaceRecord("ns", 1, 1, {"dtype": "bf16"}, NamespaceSettings(weight=2.0))
    assert actions[0] == ev.PublishNamespace(made)
    assert isinstance(actions[1], ev.SaveNamespaces)
    assert actions[2] == ev.Answer(a, m.Opened(1, 1, ALL, 64 * KIB))
    second = m.Opened(2, 1, ALL, largest_page_bytes=64 * KIB)
    assert node.send(b, m.OpenNamespace(2, "ns", {"dtype": "bf16"})) == [ev.Answer(b, second)]


def test_the_first_worker_decides_the_geometry_of_a_namespace_made_by_an_administrator() -> None:
    node = Node()
    admin = node.connect()
    assert isinstance(put_settings(node, admin, "ns", weight=3.0), m.Done)
    node.open(admin, "ns", layout="a")
    assert record(node, "ns").geometry == {"layout": "a"}
    assert record(node, "ns").settings.weight == 3.0
    assert "geometry_mismatch" in fault(node, admin, m.OpenNamespace(9, "ns", {"layout": "b"}))


def test_settings_that_cannot_be_are_refused_in_words() -> None:
    node = Node()
    admin = node.connect()
    for changes, words in [
        ({"quota_bytes": 1 << 40}, "quota is per node"),
        ({"policy": "lruu"}, "lru"),
        ({"operations_s": -1.0}, "operations_s is -1"),
        ({"bytes_s": float("nan")}, "bytes_s is nan"),
        ({"ttl_s": float("inf")}, "ttl_s is inf"),
        ({"weight": 0.0}, "weight is 0"),
        ({"copies": 0}, "copies is 0"),
        ({"copies": 17}, "copies is 17"),
        ({"read_token": "plain"}, "SHA-256"),
        ({"read_token": digest("r")}, "admin_token"),
    ]:
        found = put_settings(node, admin, "ns", **changes)
        assert isinstance(found, m.Fault)
        assert found.code == "bad_settings"
        assert words in found.message
    assert node.state.namespaces.registry.get("ns") is None
    assert "bad_namespace" in fault(node, admin, c.PutNamespace(9, "a\nb", NamespaceSettings()))


# --- dropping and replacing


def test_a_dropped_namespace_is_found_no_more_and_comes_back_empty_with_its_settings() -> None:
    node = Node()
    a = node.connect()
    put_settings(node, a, "ns", weight=5.0)
    ns = node.open(a, "ns", layout="x")
    node.put(a, ns, 1, 2)
    assert drop(node, a, "ns") == 2
    assert "unknown_namespace" in fault(node, a, m.Get(9, ns, [key(1)], [4 * KIB]))
    assert (record(node, "ns").dropped, record(node, "ns").generation) == (True, 2)
    assert drop(node, a, "ns") == drop(node, a, "never was") == 0
    again = node.open(a, "ns", layout="y")
    assert again != ns
    assert node.exists(a, again, 1, 2) == [0, 0]
    assert record(node, "ns").settings.weight == 5.0
    assert not record(node, "ns").dropped


def test_what_goes_is_saved_before_its_pages_are_freed() -> None:
    node = Node()
    a = node.connect()
    node.put(a, node.open(a), 1)
    actions = node.send(a, m.DropNamespace(1, "ns"))
    assert isinstance(actions[0], ev.SaveNamespaces)
    assert Namespaces.load(actions[0].text).numbers == []
    assert isinstance(actions[-2], ev.PublishNamespace)
    assert actions[-1] == ev.Answer(a, m.Done(1, 1))


def test_a_new_revision_takes_over_and_the_old_one_is_gone_until_an_administrator_wants_it_back() -> None:
    node = Node()
    a = node.connect()
    put_settings(node, a, "model@1", weight=4.0)
    ns = node.open(a, "model@1", layout="x")
    node.put(a, ns, 1, 2, 3)
    done = node.ask(a, c.ReplaceNamespace(1, "model@1", "model@2"), m.Done)
    assert done.count == 3
    assert node.status().used_bytes == 0
    assert record(node, "model@2").settings.weight == 4.0
    text = fault(node, a, m.OpenNamespace(2, "model@1", {"layout": "x"}))
    assert "namespace_replaced" in text
    assert "'model@2'" in text
    new = node.open(a, "model@2", layout="x")
    node.put(a, new, 1)
    assert isinstance(put_settings(node, a, "model@1", weight=7.0), m.Done)
    assert node.exists(a, node.open(a, "model@1", layout="x"), 1) == [0]
    assert node.exists(a, new, 1) == [1]
    node.ask(a, c.ReplaceNamespace(2, "model@2", "model@1"), m.Done)
    assert record(node, "model@1").settings.weight == 7.0, "it has settings of its own"
    assert "'model@1'" in fault(node, a, m.OpenNamespace(3, "model@2", {"layout": "x"}))


def test_a_switch_that_makes_no_sense_is_refused_and_changes_nothing() -> None:
    node = Node()
    a = node.connect()
    node.put(a, node.open(a, "model@1"), 1)
    assert "did you mean 'model@1'" in fault(node, a, c.ReplaceNamespace(1, "modl@1", "x"))
    assert "itself" in fault(node, a, c.ReplaceNamespace(1, "model@1", "model@1"))
    assert "bad_namespace" in fault(node, a, c.ReplaceNamespace(1, "model@1", ""))
    assert not record(node, "model@1").dropped
    assert node.status().pages == 1


# --- learning from other nodes


@pytest.mark.parametrize(
    ("news", "kept"),
    [
        (NamespaceRecord("ns", 2, 2, {}, dropped=True), False),
        (NamespaceRecord("ns", 9, 5, {}), False),  # dropped and made again
        (NamespaceRecord("ns", 5, 1, {"layout": "y"}), False),
        (NamespaceRecord("ns", 5, 1, {}, NamespaceSettings(weight=9.0)), True),
        (NamespaceRecord("elsewhere", 1, 1, {}), True),
        (NamespaceRecord("ns", 0, 0, {"layout": "z"}), True),  # old news
    ],
)
def test_what_other_nodes_know_ends_pages_of_an_older_generation_or_another_geometry(
    news: NamespaceRecord, kept: bool
) -> None:
    node, a, ns = opened()
    node.put(a, ns, 1)
    learn(node, news)
    assert node.status().pages == kept
    if kept:
        assert node.exists(a, ns, 1) == [1]
    else:
        assert "unknown_namespace" in fault(node, a, m.Exists(9, ns, [key(1)]))
    assert record(node, news.name).settings == news.settings
    assert node.do(ev.RecordsLearned([news, NamespaceRecord("ns", 0, 0, {})])) == []


def test_nodes_exchange_no_pages_of_different_generations_and_bring_nothing_back() -> None:
    node = Node()
    a, other = node.connect(), node.connect(peer=True)
    node.open(a, "ns")
    drop(node, a, "ns")
    assert "unknown_namespace" in fault(node, other, m.OpenNamespace(1, "ns", {}, 1))
    assert "unknown_namespace" in fault(node, other, m.OpenNamespace(1, "ns", {}, 2))
    assert record(node, "ns").dropped
    number = node.open(a, "ns")
    assert "unknown_namespace" in fault(node, other, m.OpenNamespace(1, "ns", {}, 1))
    opened = node.ask(other, m.OpenNamespace(1, "ns", {}, 2), m.Opened)
    assert opened.namespace == number


# --- the configuration


def test_configured_namespaces_are_there_at_the_start_and_an_administrators_change_outlives_a_restart() -> (
    None
):
    rules = Rules(named={"ns": NamespaceSettings(weight=2.0)})
    node = Node(rules=rules)
    a = node.connect()
    assert record(node, "ns").settings.weight == 2.0
    put_settings(node, a, "ns", weight=3.0)
    assert configured(node, rules).settings.weight == 3.0
    changed = Rules(named={"ns": NamespaceSettings(weight=4.0)})
    assert configured(node, changed).settings.weight == 4.0
    drop(node, a, "ns")
    assert configured(node, rules).dropped


def configured(node: Node, rules: Rules) -> NamespaceRecord:
    """The record after a restart with this configuration."""
    again = Node(rules=rules, namespaces=Namespaces.load(node.state.namespaces.dump()))
    return record(again, "ns")


# --- rights


def guarded_node() -> Node:
    node = Node(rules=Rules(admin_token=digest("root"), named={"ns": GUARDED}))
    root = node.connect(token="root")
    node.put(root, node.open(root), 1)
    return node


READERS, WRITERS, ADMINS = "reader writer admin root node", "writer admin root node", "admin root node"
MAY_BE_ASKED: dict[str, tuple[Callable[[int], m.Request], str]] = {
    "exists": (lambda ns: m.Exists(1, ns, [key(1)]), READERS),
    "get": (lambda ns: m.Get(1, ns, [key(1)], [4 * KIB]), READERS),
    "wait": (lambda ns: m.Wait(1, ns, [key(1)], 0.0), READERS),
    "open": (lambda ns: m.OpenNamespace(1, "ns", {}), READERS),
    "reserve": (lambda ns: m.Reserve(1, ns, [key(2)], [4 * KIB]), WRITERS),
    "discard": (lambda ns: m.Discard(1, ns, [], []), WRITERS),
    "open what nobody opened, and decide its geometry": (
        lambda ns: m.OpenNamespace(1, "next", {"layout": "x"}),
        WRITERS,
    ),
    "open what was dropped": (lambda ns: m.OpenNamespace(1, "dropped", {"layout": "x"}), WRITERS),
    "clear": (lambda ns: m.Clear(1, ns), ADMINS),
    "put": (lambda ns: c.PutNamespace(1, "ns", GUARDED), ADMINS),
    "replace": (lambda ns: c.ReplaceNamespace(1, "ns", "next"), ADMINS),
    "drop": (lambda ns: m.DropNamespace(1, "ns"), ADMINS),
    "drop a tenant's": (lambda ns: m.DropNamespace(1, "ns#acme"), ADMINS),
    "drop a tenant of no model": (lambda ns: m.DropNamespace(1, "#acme"), "root node"),
    "erase": (lambda ns: m.Erase(1, ns, [key(1)]), ADMINS),
    "list namespaces": (lambda ns: c.ListNamespaces(1), ADMINS),
    "open a new one": (lambda ns: m.OpenNamespace(1, "new", {}), "root node"),
    "put a new one": (lambda ns: c.PutNamespace(1, "new", GUARDED), "root node"),
    "replace by a new one": (lambda ns: c.ReplaceNamespace(1, "ns", "new"), "root node"),
    "list pages": (lambda ns: c.ListPages(1, "ns", 0, 1), "root node"),
    "drain": (lambda ns: c.Drain(1), "root node"),
    "upgrade": (lambda ns: c.Upgrade(1), "root node"),
    "probe": (lambda ns: c.ProbePeer(1, "n1"), "node"),
}
HAD_DONE_BY_ALL = m.Clear | m.Discard | m.Erase | m.DropNamespace
"""What a node that has others asks them for with its own rights, before it does it itself."""
ROLES = {"nobody": "", "guesser": "x", "reader": "r", "writer": "w", "admin": "a", "root": "root", "node": ""}


@pytest.mark.parametrize("operation", MAY_BE_ASKED)
def test_who_may_do_what(operation: str) -> None:
    make, may = MAY_BE_ASKED[operation]
    for role, token in ROLES.items():
        node = guarded_node()
        root, ns = node.connect(token="root"), node.state.namespaces.numbers[0]
        for name in ("next", "dropped"):
            put_settings(node, root, name, **msgspec.structs.asdict(GUARDED))
        drop(node, root, "dropped")
        known = len(node.state.namespaces.registry)
        client = node.connect(token=token, peer=role == "node")
        if isinstance(make(ns), HAD_DONE_BY_ALL):
            assert bool(node.state.refusal(client, make(ns))) == (role not in may.split()), role
        said = answers(node.send(client, make(ns)), client)
        refused = [one for one in said if isinstance(one, m.Fault) and one.code == "access_denied"]
        assert bool(refused) == (role not in may.split()), (role, said)
        assert not refused or len(node.state.namespaces.registry) == known


def test_a_changed_token_ends_the_rights_of_those_who_are_connected_and_what_they_had_begun() -> None:
    node = guarded_node()
    writer, reader, root = (node.connect(token=token) for token in ("w", "r", "root"))
    ns = node.open(writer)
    assert node.exists(reader, ns, 1) == [1]
    grants = node.reserve(writer, ns, 7, 8)
    assert answers(node.send(reader, m.Wait(50, ns, [key(7)], 30.0)), reader) == []
    put_settings(
        node, root, "ns", **dict.fromkeys(("read_token", "write_token"), digest("new")), admin_token=KEPT
    )
    assert node.commit(writer, *grants) == [0, 0]
    assert (node.status().reserved_bytes, node.status().pins) == (0, 0)
    assert "access_denied" in fault(node, reader, m.Exists(1, ns, [key(1)]))
    [grant] = node.reserve(root, ns, 7)
    assert answers(node.send(root, commit(51, grant)), reader) == [m.Present(50, b"\0")], "it tells nothing"
    assert record(node, "ns").settings.admin_token == GUARDED.admin_token


def test_opening_tells_the_rights_or_what_token_is_needed_and_never_a_token() -> None:
    node = guarded_node()
    reader = node.connect(token="r")
    assert node.ask(reader, m.OpenNamespace(1, "ns", {}), m.Opened).rights == READ
    text = fault(node, node.connect(token="s3cret"), m.OpenNamespace(1, "ns", {}))
    assert text.startswith("access_denied: namespace 'ns'")
    assert "read token" in text
    assert "pool.token" in text
    for secret in ("s3cret", digest("s3cret"), GUARDED.read_token):
        assert secret not in text


def test_status_and_list_keep_namespaces_from_those_who_may_not_see_them() -> None:
    node = guarded_node()
    root, stranger, tenant = (node.connect(token=token) for token in ("root", "", "a"))
    node.open(root, "open to all")
    names = [
        [n.name for n in node.ask(each, m.Status(1), m.StatusReport).namespaces]
        for each in (root, stranger, tenant)
    ]
    assert names == [["ns", "open to all"], ["open to all"], ["ns", "open to all"]]
    lists = [
        [n.name for n in node.ask(each, c.ListNamespaces(1), c.NamespaceList).namespaces]
        for each in (root, tenant)
    ]
    assert lists == [["ns", "open to all"], ["ns"]]
    assert "access_denied" in fault(node, stranger, c.ListNamespaces(1))
    [shown, _] = node.ask(root, c.ListNamespaces(1), c.NamespaceList).namespaces
    assert shown.settings.read_token == KEPT


def test_workers_with_the_default_write_token_make_their_namespaces_up_to_a_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(namespace_admin, "MAX_NAMESPACES_PER_TOKEN", 2)
    node = Node(rules=Rules(admin_token=digest("root"), defaults=NamespaceSettings(write_token=digest("w"))))
    stranger, worker, root = node.connect(), node.connect(token="w"), node.connect(token="root")
    assert "access_denied" in fault(node, stranger, m.OpenNamespace(1, "a", {"layout": "x"}))
    for name in ("a", "b"):
        node.open(worker, name, layout="x")
    assert "too_many_namespaces" in fault(node, worker, m.OpenNamespace(1, "c", {"layout": "x"}))
    node.open(worker, "a", layout="x")
    node.open(root, "c", layout="x")
    drop(node, worker, "a")
    drop(node, worker, "b")
    node.open(worker, "d", layout="x")


@pytest.mark.parametrize(
    ("bound", "most", "then"),
    [("MAX_NAMESPACES", 8, "changes tokens"), ("MAX_REGISTRY_BYTES", 8 * KIB, "drops")],
)
def test_a_token_leaves_room_for_the_operator_whatever_its_holder_does(
    monkeypatch: pytest.MonkeyPatch, bound: str, most: int, then: str
) -> None:
    monkeypatch.setattr(registry, bound, most)
    node = Node(rules=WITH_DEFAULT_WRITE)
    worker, root = node.connect(token="w"), node.connect(token="root")
    for i in range(100):
        said = reply(node, worker, m.OpenNamespace(node.next_id(), f"n{i}", {"layout": "x" * 64}))
        if isinstance(said, m.Fault):
            assert said.code == "too_many_namespaces"
            break
        if then == "drops":
            drop(node, worker, f"n{i}")
        else:
            put_settings(node, worker, f"n{i}", write_token=digest(f"other {i}"))
    assert 0 < i < 99
    node.open(root, "operator's", layout="x" * 512)


@pytest.mark.parametrize(
    "limits",
    [{"weight": 1e6}, {"quota_bytes": 0}, {"policy": "keep"}, {"copies": 16}, {"operations_s": 0.0}],
)
def test_a_tenant_lifts_no_limits_of_its_own_where_the_node_has_an_administrator(
    limits: dict[str, Any],
) -> None:
    tokens = {"read_token": digest("r"), "write_token": digest("w")}
    bounded = NamespaceSettings(quota_bytes=64 * KIB, operations_s=5.0, **tokens)
    node = Node(rules=Rules(admin_token=digest("root"), named={"ns": bounded}))
    tenant, root = node.connect(token="w"), node.connect(token="root")
    wanted = msgspec.structs.replace(bounded, **limits)
    said = fault(node, tenant, c.PutNamespace(1, "ns", wanted))
    assert "access_denied" in said
    assert "limits of namespace 'ns'" in said
    assert record(node, "ns").settings == bounded
    rotated = msgspec.structs.replace(bounded, write_token=digest("new"))
    assert isinstance(reply(node, tenant, c.PutNamespace(2, "ns", rotated)), m.Done)
    assert isinstance(reply(node, root, c.PutNamespace(3, "ns", wanted)), m.Done)


@pytest.mark.parametrize("token", ["", "x", "of another namespace"])
@pytest.mark.parametrize("defaults", [NamespaceSettings(), GUARDED])
def test_nobody_learns_by_refusals_whether_a_name_is_there(token: str, defaults: NamespaceSettings) -> None:
    """Names tell of models and tenants."""
    node = Node(rules=Rules(admin_token=digest("root"), defaults=defaults))
    root, client = node.connect(token="root"), node.connect(token=token)
    for name in ("there", "dropped", "replaced", "next"):
        put_settings(node, root, name, **msgspec.structs.asdict(GUARDED))
        node.open(root, name)
    drop(node, root, "dropped")
    node.ask(root, c.ReplaceNamespace(2, "replaced", "next"), m.Done)
    mine = digest("of another namespace")
    put_settings(node, root, "mine", read_token=mine, write_token=mine, admin_token=mine)
    makers = [
        lambda name: m.OpenNamespace(1, name, {"layout": "x"}),
        lambda name: m.DropNamespace(1, name),
        lambda name: c.PutNamespace(1, name, NamespaceSettings()),
        lambda name: c.ReplaceNamespace(1, name, "mine"),
        lambda name: c.ReplaceNamespace(1, "mine", name),
    ]
    for make in makers:
        said = {
            fault(node, client, make(name)).replace(f"'{name}'", "NAME")
            for name in ("there", "dropped", "replaced", "never")
        }
        assert len(said) == 1, said
    assert record(node, "there").settings == GUARDED


def test_a_number_tells_no_name_to_those_who_may_not_read_it() -> None:
    node = guarded_node()
    ns = node.state.namespaces.numbers[0]
    for request in (m.Exists(1, ns, [key(1)]), m.Reserve(1, ns, [key(2)], [4 * KIB]), m.Clear(1, ns)):
        assert "'ns'" not in fault(node, node.connect(token="x"), request)
    assert "'ns'" in fault(node, node.connect(token="r"), m.Reserve(1, ns, [key(2)], [4 * KIB]))


# --- anything at all


NAMES = ["a", "b"]
OPERATIONS = st.one_of(
    st.tuples(st.just("open"), st.sampled_from(NAMES), st.sampled_from(["", "x", "y"])),
    st.tuples(st.just("put"), st.sampled_from(NAMES), st.integers(1, 3)),
    st.tuples(st.just("drop"), st.sampled_from(NAMES)),
    st.tuples(st.just("replace"), st.sampled_from(NAMES), st.sampled_from(NAMES)),
    st.tuples(st.just("gossip"), st.integers(0, 1)),
)


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.tuples(st.integers(0, 1), OPERATIONS), max_size=25))
def test_two_nodes_agree_once_they_have_talked_and_keep_no_page_of_an_older_generation(
    steps: list[tuple[int, tuple[object, ...]]],
) -> None:
    nodes = [Node(), Node()]
    for at, (what, *args) in steps:
        node = nodes[at]
        connection = node.connect()
        if what == "open":
            geometry = {"layout": args[1]} if args[1] else {}
            found = reply(node, connection, m.OpenNamespace(1, args[0], geometry))  # type: ignore[arg-type]
            if isinstance(found, m.Opened):
                node.put(connection, found.namespace, 1)
        elif what == "put":
            put_settings(node, connection, args[0], weight=float(args[1]))  # type: ignore[arg-type]
        elif what == "drop":
            drop(node, connection, args[0])  # type: ignore[arg-type]
        elif what == "replace":
            reply(node, connection, c.ReplaceNamespace(1, args[0], args[1]))  # type: ignore[arg-type]
        elif what == "gossip":
            learn(node, *nodes[1 - at].state.namespaces.registry)
    for at in (0, 1, 0):
        learn(nodes[at], *nodes[1 - at].state.namespaces.registry)
    known = [{r.name: r for r in node.state.namespaces.registry} for node in nodes]
    assert known[0] == known[1]
    for node in nodes:
        for namespace in node.state.namespaces:
            found_record = known[0][namespace.name]
            assert not found_record.dropped
            assert namespace.generation == found_record.generation
            assert found_record.geometry in ({}, namespace.geometry)


def with_namespaces(count: int) -> Node:
    node = guarded_node()
    learn(node, *(NamespaceRecord(f"n{n}", 1, 0, {}, GUARDED) for n in range(count)))
    return node


@pytest.mark.parametrize("token", ["", "r", "x"])
def test_the_work_for_who_may_see_nothing_does_not_grow_with_what_there_is(token: str) -> None:
    calls = []
    for count in (4, 400):
        node = with_namespaces(count)
        session = node.state.sessions[node.connect(token=token)]
        node.state.administration.may_write(session)  # after a change it counts once
        handle = node.state.administration.handle
        requests = (c.ListNamespaces(1), c.ListNamespaces(2))
        calls.append(calls_of(lambda: [handle(session, one, []) for one in requests]))  # noqa: B023
        calls[-1] += calls_of(lambda: node.state.administration.may_write(session))  # noqa: B023
    assert calls[1] <= calls[0] + 10


def test_a_long_name_is_not_compared_with_all_others_to_its_end() -> None:
    known = [f"model-{n}@{'r' * 500}" for n in range(1000)]
    assert calls_of(lambda: nearest("model-7@" + "s" * 500, known)) < 3_000
    assert nearest("modle@1", ["other", "model@1", "model@2000"]) == "model@1"
    assert nearest("x", known) == ""
