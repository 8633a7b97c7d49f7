"""Pages of tenants: counted apart, evicted by their own quota, and voided together."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.kvpool.core import events as ev
from pdserve.kvpool.core.namespace_admin import Rules
from pdserve.kvpool.core.store import lazy_free
from pdserve.kvpool.core.tiering.tier_index import TierSpec
from pdserve.kvpool.namespaces.catalog import Namespaces
from pdserve.kvpool.namespaces.tenants import name_of, split, tenant_of
from pdserve.kvpool.protocol import cluster_messages as c
from pdserve.kvpool.protocol import messages as m
from pdserve.kvpool.protocol.cluster_messages import NamespaceSettings
from pdserve.security.tokens import digest
from tests.support.kvpool.node_model import KIB, Node, answers, key
from tests.support.suite.extended import examples

PAGE = 4 * KIB
GUARDED = NamespaceSettings(read_token=digest("r"), write_token=digest("w"), admin_token=digest("a"))


def model_of(node: Node, **quotas: int) -> int:
    """A client of the namespace "m", which has these settings."""
    client = node.connect()
    node.open(client, "m", dtype="bf16")
    put_settings(node, "m", **quotas)
    return client


def put_settings(node: Node, name: str, **changes: int) -> m.Reply:
    request = c.PutNamespace(node.next_id(), name, NamespaceSettings(**changes))  # type: ignore[arg-type]
    return node.ask(node.connect(), request, object)  # type: ignore[return-value]


def open_tenant(node: Node, client: int, tenant: str, model: str = "m") -> int:
    return node.open(client, name_of(model, tenant), dtype="bf16")


def pages_of(node: Node, namespace: str) -> int:
    found = [space.pages for space in node.status().namespaces if space.name == namespace]
    return found[0] if found else 0


def drop(node: Node, name: str) -> int:
    """The number of pages, once they are erased."""
    client = node.connect()
    actions = node.send(client, m.DropNamespace(node.next_id(), name))
    [found] = answers(actions + node.pass_time(0.1), client)
    node.actions = actions
    assert isinstance(found, m.Done)
    return found.count


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("m#acme", ("m", "acme")),
        ("m@1#a.b-c_2", ("m@1", "a.b-c_2")),
        ("m", ("m", "")),
        ("m#", ("m#", "")),
        ("#acme", ("#acme", "")),
        ("a#b@0123", ("a#b@0123", "")),
        ("m#-x", ("m#-x", "")),
    ],
)
def test_the_name_of_a_namespace_says_whose_it_is(name: str, parts: tuple[str, str]) -> None:
    assert split(name) == parts
    assert not parts[1] or name_of(*parts) == name


@pytest.mark.parametrize(
    ("salt", "tenant"),
    [
        ("tenant/acme", "acme"),
        ("tenant/acme/own/salt", "acme"),
        ("shared/acme", ""),
        ("tenant/", ""),
        ("tenant/a b", ""),
        ("acme", ""),
        (None, ""),
    ],
)
def test_a_salt_of_the_router_says_whose_a_request_is(salt: str | None, tenant: str) -> None:
    assert tenant_of(salt) == tenant


# --- quotas


@settings(max_examples=examples(30), deadline=None)
@given(
    quotas=st.lists(st.integers(1, 24), min_size=1, max_size=4),
    of_model=st.integers(0, 40),
    policy=st.sampled_from(["lru", "lfu", "fifo", "arc"]),
    seed=st.integers(0, 1 << 30),
)
def test_no_tenant_exceeds_its_quota_and_none_makes_another_that_is_within_its_own_lose_a_page(
    quotas: list[int], of_model: int, policy: str, seed: int
) -> None:
    """Where the memory, and the model's quota, have room for all quotas together."""
    node, rng = Node(slabs=8), random.Random(seed)
    total = sum(quotas)
    bound = of_model and max(of_model, total)
    client = node.connect()
    node.open(client, "m", dtype="bf16")
    request = c.PutNamespace(1, "m", NamespaceSettings(policy=policy, quota_bytes=bound * PAGE))
    node.ask(client, request, m.Done)
    spaces = [open_tenant(node, client, f"t{i}") for i in range(len(quotas))]
    for i, quota in enumerate(quotas):
        put_settings(node, f"m#t{i}", quota_bytes=quota * PAGE)
    newest = 0
    for _ in range(120):
        tenant = rng.randrange(len(quotas))
        before = [pages_of(node, f"m#t{i}") for i in range(len(quotas))]
        some = range(newest, newest := newest + rng.randint(1, 4))
        node.put(client, spaces[tenant], *some)
        if before[tenant]:
            node.release(client, *[p for p in node.get(client, spaces[tenant], *some) if p.status == m.HIT])
        for i, quota in enumerate(quotas):
            now = pages_of(node, f"m#t{i}")
            assert now <= quota
            assert i == tenant or now == before[i]
        assert pages_of(node, f"m#t{tenant}") >= min(quotas[tenant], before[tenant])


def test_a_model_at_its_quota_evicts_among_all_of_its_tenants_and_from_nobody_else() -> None:
    node = Node(slabs=4)
    client = model_of(node, quota_bytes=16 * PAGE)
    other = node.open(client, "other")
    node.put(client, other, *range(1000, 1010))
    a, b = open_tenant(node, client, "a"), open_tenant(node, client, "b")
    node.put(client, a, *range(16))
    node.put(client, b, *range(100, 112))
    assert (pages_of(node, "m#a"), pages_of(node, "m#b"), pages_of(node, "other")) == (4, 12, 10)


def test_a_quota_of_its_own_counts_before_the_models_default_and_both_change_live() -> None:
    node = Node(slabs=4)
    client = model_of(node, tenant_quota_bytes=8 * PAGE)
    a, b = open_tenant(node, client, "a"), open_tenant(node, client, "b")
    put_settings(node, "m#a", quota_bytes=12 * PAGE)
    node.put(client, a, *range(20))
    node.put(client, b, *range(100, 120))
    node.put(client, a, *range(20, 40))
    assert (pages_of(node, "m#a"), pages_of(node, "m#b")) == (12, 8)
    put_settings(node, "m", tenant_quota_bytes=2 * PAGE)
    node.pass_time(1)
    assert (pages_of(node, "m#a"), pages_of(node, "m#b")) == (12, 2)
    put_settings(node, "m#a")
    node.pass_time(1)
    assert pages_of(node, "m#a") == 2


@pytest.mark.parametrize("changes", [{"weight": 2}, {"copies": 2}, {"bytes_s": 5}, {"tenant_quota_bytes": 1}])
def test_a_tenant_has_nothing_of_its_own_but_quotas(changes: dict[str, int]) -> None:
    node = Node()
    model_of(node)
    refused = put_settings(node, "m#a", **changes)
    assert isinstance(refused, m.Fault)
    assert refused.code == "bad_settings"


# --- rights


def test_the_tokens_of_the_model_guard_its_tenants_also_after_they_were_changed() -> None:
    node = Node(rules=Rules(admin_token=digest("root"), named={"m": GUARDED}))
    writer, reader, stranger = node.connect(token="w"), node.connect(token="r"), node.connect()
    node.open(writer, "m", dtype="bf16")
    for client in (reader, stranger):  # a reader makes none
        assert refusal(node, client, m.OpenNamespace(1, "m#acme", {"dtype": "bf16"})) == "access_denied"
    acme = open_tenant(node, writer, "acme")
    node.put(writer, acme, 1)
    assert node.exists(reader, open_tenant(node, reader, "acme"), 1) == [1]
    assert refusal(node, stranger, m.Exists(1, acme, [bytes(32)])) == "access_denied"
    assert refusal(node, reader, m.Reserve(1, acme, [bytes(32)], [PAGE])) == "access_denied"
    assert refusal(node, writer, m.DropNamespace(1, "#acme")) == "access_denied"
    new = c.PutNamespace(1, "m", NamespaceSettings(read_token=digest("n"), write_token=digest("n")))
    assert node.ask(node.connect(token="root"), new, m.Done)
    assert refusal(node, writer, m.Exists(1, acme, [bytes(32)])) == "access_denied"
    assert node.ask(node.connect(token="n"), m.DropNamespace(2, "#acme"), m.Done).count == 1


def test_tenants_records_open_no_door_on_a_guarded_node() -> None:
    node = Node(rules=Rules(admin_token=digest("root"), named={"m": GUARDED}, defaults=GUARDED))
    writer = node.connect(token="w")
    node.open(writer, "m", dtype="bf16")
    open_tenant(node, writer, "acme")
    stranger = node.state.sessions[node.connect()]
    assert not node.state.administration.may_write(stranger)


def test_there_are_no_tenants_of_what_is_not_there() -> None:
    node = Node()
    assert refusal(node, node.connect(), m.OpenNamespace(1, "m#acme", {})) == "unknown_namespace"


def refusal(node: Node, client: int, request: m.Request) -> str:
    [found] = answers(node.send(client, request), client)
    assert isinstance(found, m.Fault), found
    return found.code


# --- erasing


def wiped(actions: list[ev.Action]) -> list[tuple[int, int]]:
    return [one for action in actions if isinstance(action, ev.FreeRows) for one in action.wipe]


@pytest.mark.parametrize("whole", [True, False])
def test_every_slot_that_had_bytes_of_erased_pages_is_zeroed_before_the_answer(whole: bool) -> None:
    """Also those that a reader or a writer still holds, once it lets go."""
    node = Node()
    client, admin = model_of(node), node.connect()
    a, b = open_tenant(node, client, "a"), open_tenant(node, client, "b")
    node.put(client, b, 8)
    grants = node.put(client, a, 1, 2)
    pins, writing = node.get(client, a, 1), node.reserve(client, a, 3)
    request: m.Request = m.DropNamespace(1, "#a") if whole else m.Erase(1, a, [key(1), key(2), key(3)])
    actions = node.send(admin, request)
    assert answers(actions, admin) == []
    ranges = wiped(actions) + wiped(node.pass_time(0.1))
    ranges += wiped(node.release(client, *pins))
    assert node.commit(client, *writing) == [0]
    actions = node.actions + node.pass_time(0.1)
    assert answers(actions, admin) == [m.Done(1, 2)]
    ranges += wiped(actions)
    assert sorted(ranges) == sorted((g.offset, g.offset + PAGE) for g in (*grants, *writing))
    assert node.exists(client, b, 8) == [1]


def test_an_erasure_waits_for_the_tiers_and_says_what_is_left_when_they_do_not_answer() -> None:
    node = Node(tiers=[TierSpec("t", "memory", 1 << 20)])
    client = model_of(node)
    a = open_tenant(node, client, "a")
    node.put(client, a, 1)
    told = node.send(client, m.Erase(5, a, [key(1)]))
    [asked] = [one for one in told if isinstance(one, ev.ErasePages)]
    assert asked.keys == (key(1),)
    assert answers(told + node.pass_time(1), client) == []
    assert answers(node.do(ev.PagesErased(asked.ticket)), client) == [m.Done(5, 1)]
    for problem, hint in [("disk", "disk"), ("", "tiers that have not answered")]:
        [asked] = [
            one for one in node.send(client, m.Erase(6, a, [key(1)])) if isinstance(one, ev.ErasePages)
        ]
        actions = node.do(ev.PagesErased(asked.ticket, problem)) if problem else node.pass_time(61)
        [found] = answers(actions, client)
        assert isinstance(found, m.Fault)
        assert found.code == "not_erased"
        assert hint in found.message


def test_a_large_erasure_takes_small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lazy_free, "ERASED_BYTES", 4 * PAGE)
    node = Node()
    client = model_of(node)
    a = open_tenant(node, client, "a")
    node.put(client, a, *range(10))
    admin = node.connect()
    steps = [wiped(node.send(admin, m.DropNamespace(1, "#a")))] + [
        wiped(node.pass_time(0.01)) for _ in range(4)
    ]
    assert [len(step) for step in steps] == [0, 4, 4, 2, 0]


# --- dropping


def test_deleting_a_tenant_voids_its_pages_of_all_models_and_those_that_are_being_written() -> None:
    node = Node()
    client = model_of(node)
    node.open(client, "n", dtype="bf16")
    m_a, n_a, m_b = (open_tenant(node, client, *of) for of in [("a", "m"), ("a", "n"), ("b", "m")])
    node.put(client, m_a, 1, 2)
    node.put(client, n_a, 3)
    node.put(client, m_b, 4)
    before = node.reserve(client, m_a, 5)
    admin = node.connect()
    assert answers(node.send(admin, m.DropNamespace(1, "#a")), admin) == []
    assert node.commit(client, *before) == [0]  # the writer has stopped
    assert answers(node.pass_time(0.1), admin) == [m.Done(1, 3)]
    assert refusal(node, client, m.Exists(1, m_a, [bytes(32)])) == "unknown_namespace"
    again = open_tenant(node, client, "a")
    assert node.exists(client, again, 1, 2, 5) == [0, 0, 0]
    assert node.exists(client, m_b, 4) == [1]
    node.put(client, again, 1)
    assert drop(node, "#a") == 1


def test_a_node_that_was_away_drops_what_was_deleted_meanwhile_and_keeps_what_came_after() -> None:
    here, away = Node(), Node()
    for node in (here, away):
        open_tenant(node, model_of(node), "a")
    client = away.connect()
    away.put(client, open_tenant(away, client, "a"), 1)
    drop(here, "#a")
    told = [one.record for one in here.actions if isinstance(one, ev.PublishNamespace)]
    away.do(ev.RecordsLearned(told))
    assert pages_of(away, "m#a") == 0
    assert refusal_of_peer(away, generation=1) == "unknown_namespace"
    away.put(client, open_tenant(away, client, "a"), 2)
    away.do(ev.RecordsLearned(told))
    assert pages_of(away, "m#a") == 1
    assert refusal_of_peer(away, generation=1) == "unknown_namespace"


@pytest.mark.parametrize(
    ("named", "started_ms", "is_void"),
    [
        (["n0"], 0, True),  # it runs, and could not be reached
        ([], 9000, True),  # it was away for so long that nobody remembers it
        (["n5"], 0, False),  # it was there
    ],
)
def test_a_node_that_was_away_when_single_pages_were_erased_voids_its_own(
    named: list[str], started_ms: int, is_void: bool
) -> None:
    here, away = Node(), Node(started_ms=started_ms)
    for node in (here, away):
        client = model_of(node)
        numbers = [open_tenant(node, client, tenant) for tenant in ("a", "b")]
        for number in numbers:
            node.put(client, number, 1)
    here.now_s += 5
    here.send(client, m.Erase(1, numbers[0], [key(2)], named))
    told = [one.record for one in here.actions if isinstance(one, ev.PublishNamespace)]
    assert pages_of(here, "m#a") == 1, "nothing but the page is erased here"
    away.do(ev.RecordsLearned(told))
    assert [pages_of(away, f"m#{tenant}") for tenant in "ab"] == [not is_void, 1]
    away.put(client, numbers[0], 3)
    away.do(ev.RecordsLearned(told))
    assert pages_of(away, "m#a") == 2 - is_void, "once is enough"


def refusal_of_peer(node: Node, generation: int) -> str:
    """What a node that has not heard of the drop is told, when it brings pages."""
    return refusal(node, node.connect(peer=True), m.OpenNamespace(1, "m#a", {"dtype": "bf16"}, generation))


@pytest.mark.parametrize("how", ["drop", "clear", "replace"])
def test_what_voids_a_model_voids_its_tenants(how: str) -> None:
    node = Node()
    client = model_of(node)
    a = open_tenant(node, client, "a")
    put_settings(node, "m#a", quota_bytes=9 * PAGE)
    node.put(client, a, 1, 2)
    number = node.open(client, "m", dtype="bf16")
    request = {
        "drop": m.DropNamespace(1, "m"),
        "clear": m.Clear(1, number),
        "replace": c.ReplaceNamespace(1, "m", "new"),
    }[how]
    assert node.ask(client, request, m.Done).count == 2
    if how == "clear":
        assert node.exists(client, a, 1, 2) == [0, 0]
    else:
        assert refusal(node, client, m.Exists(1, a, [bytes(32)])) == "unknown_namespace"
        told = node.state.namespaces.registry.get("m#a")
        assert told is not None
        assert told.dropped
    if how == "replace":
        kept = node.state.namespaces.registry.get("new#a")
        assert kept is not None
        assert kept.settings.quota_bytes == 9 * PAGE


def test_a_restart_finds_tenants_as_they_were() -> None:
    node = Node()
    client = model_of(node, tenant_quota_bytes=3 * PAGE)
    open_tenant(node, client, "a")
    open_tenant(node, client, "b")
    drop(node, "#b")
    saved = [one.text for one in node.actions if isinstance(one, ev.SaveNamespaces)][-1]
    found = Namespaces.load(saved)
    assert {one.name: one.geometry for one in found} == {n: {"dtype": "bf16"} for n in ("m", "m#a")}
    assert saved.count("bf16") == 2  # the list's, and the record's of the model
    restarted = Node(namespaces=found)
    client = restarted.connect()
    restarted.put(client, open_tenant(restarted, client, "a"), *range(5))
    assert pages_of(restarted, "m#a") == 3
