"""SGLang's counts of fetches that it declined, as a metric that only grows."""

from __future__ import annotations

from pdserve.engine.sglang.children.declined_fetches import DeclinedFetches


def test_what_sglangs_counts_gain_is_added_by_reason() -> None:
    counts = {"attempts": 9, "declined_rate_limited": 0, "declined_host_oversize": 0}
    added: list[tuple[str, int]] = []
    read = DeclinedFetches(lambda reason, count: added.append((reason, count))).reading(
        lambda _: dict(counts)
    )
    assert read(None) == counts
    assert added == [("others_under_way", 0), ("larger_than_host_memory", 0)]  # shown before the first
    added.clear()
    counts |= {"declined_rate_limited": 2, "declined_host_oversize": 1}
    assert read(None) == read(None) == counts
    assert added == [("others_under_way", 2), ("larger_than_host_memory", 1)]
    counts["declined_rate_limited"] = 1  # SGLang started anew
    read(None)
    counts["declined_rate_limited"] = 3
    read(None)
    assert added[2:] == [("others_under_way", 2)]
