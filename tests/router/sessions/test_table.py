from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdserve.router.sessions.keys import SessionKey, named
from pdserve.router.sessions.table import SessionEntry, SessionTable

KEYS = st.lists(st.sampled_from("abcdef"), min_size=1, max_size=4, unique=True).map(
    lambda links: SessionKey(links[0], tuple(links))
)
STEPS = st.lists(st.tuples(st.sampled_from(["record", "get"]), KEYS, st.floats(0, 5)), max_size=60)


@given(STEPS, st.integers(1, 5), st.floats(0.1, 10))
def test_the_table_agrees_with_a_model_of_it(
    steps: list[tuple[str, SessionKey, float]], capacity: int, ttl_s: float
) -> None:
    table, model, now_s = SessionTable(capacity, ttl_s), dict[str, SessionEntry](), 0.0
    for number, (what, key, passed_s) in enumerate(steps):
        now_s += passed_s
        fresh = {link: entry for link, entry in model.items() if now_s - entry.seen_s <= ttl_s}
        if what == "record":
            entry = SessionEntry(f"r{number}", f"d{number}", now_s)
            table.record(key, entry)
            for link in key.links:
                model.pop(link, None)
            model[key.links[-1]] = entry
            while len(model) > capacity:
                model.pop(next(iter(model)))
        else:
            known = [fresh[link] for link in reversed(key.links) if link in fresh]
            assert table.get(key, now_s) == (known[0] if known else None)
        assert len(table) <= capacity


def test_recording_new_sessions_clears_out_old_ones() -> None:
    table = SessionTable(1000, ttl_s=10)
    for i in range(100):
        table.record(named(f"old{i}"), SessionEntry("r", "d", 0.0))
    for i in range(60):
        table.record(named(f"new{i}"), SessionEntry("r", "d", 20.0))
    assert len(table) == 60


def test_conversations_that_begin_alike_are_told_apart_from_their_second_turn_on() -> None:
    table = SessionTable(10, ttl_s=10)
    table.record(named("h1"), SessionEntry("a1", "d", 0.0))
    table.record(SessionKey("h1", ("h1", "a2", "a3")), SessionEntry("a2", "d", 1.0))
    table.record(named("h1"), SessionEntry("b1", "d", 2.0))
    table.record(SessionKey("h1", ("h1", "b2", "b3")), SessionEntry("b2", "d", 3.0))
    found = table.get(SessionKey("h1", ("h1", "a2", "a3", "a4", "a5")), 4.0)
    assert found is not None
    assert found.request_id == "a2"
