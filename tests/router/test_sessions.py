from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdserve.router.sessions import SessionEntry, SessionTable

STEPS = st.lists(
    st.tuples(st.sampled_from(["record", "get"]), st.sampled_from("abcdefgh"), st.floats(0, 5)), max_size=60
)


@given(STEPS, st.integers(1, 5), st.floats(0.1, 10))
def test_the_table_agrees_with_a_model_of_it(
    steps: list[tuple[str, str, float]], capacity: int, ttl_s: float
) -> None:
    table, model, now_s = SessionTable(capacity, ttl_s), dict[str, SessionEntry](), 0.0
    for number, (what, key, passed_s) in enumerate(steps):
        now_s += passed_s
        if what == "record":
            table.record(key, f"r{number}", f"d{number}", now_s)
            model.pop(key, None)
            model[key] = SessionEntry(f"r{number}", f"d{number}", now_s)
            while len(model) > capacity:
                model.pop(next(iter(model)))
        else:
            wanted = model.get(key)
            if wanted is not None and now_s - wanted.seen_s > ttl_s:
                wanted = None
            assert table.get(key, now_s) == wanted
        assert len(table) <= capacity


def test_recording_new_sessions_clears_out_old_ones() -> None:
    table = SessionTable(1000, ttl_s=10)
    for i in range(100):
        table.record(f"old{i}", "r", "d", 0.0)
    for i in range(60):
        table.record(f"new{i}", "r", "d", 20.0)
    assert len(table) == 60
