"""Shares, rates and bounds of the queue between namespaces."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.kvpool.node.serving.fair_queue import BURST_S, KEY_COST_BYTES, MAX_QUEUED_S, FairQueue
from tests.support.suite.extended import examples


def queue_of(max_queued: int = 256, **flows: tuple[float, float, float]) -> FairQueue[object]:
    """Flows f1, f2, ...: weight, operations/s, bytes/s."""
    queue: FairQueue[object] = FairQueue(max_queued)
    for name, (weight, operations_s, bytes_s) in flows.items():
        queue.configure(int(name[1:]), weight=weight, operations_s=operations_s, bytes_s=bytes_s, now_s=0.0)
    return queue


WEIGHTS = st.lists(st.sampled_from([0.5, 1.0, 2.0, 3.0, 8.0]), min_size=2, max_size=5)
SIZES = st.lists(st.tuples(st.integers(1, 32), st.integers(0, 1 << 20)), min_size=1, max_size=8)


@settings(max_examples=examples(100), deadline=None)
@given(WEIGHTS, st.data())
def test_backlogged_namespaces_get_service_in_proportion_to_their_weights(
    weights: list[float], data: st.DataObject
) -> None:
    queue = queue_of(**{f"f{i}": (weight, 0.0, 0.0) for i, weight in enumerate(weights)})
    sizes = [data.draw(SIZES) for _ in weights]
    asked: Counter[int] = Counter()

    def put(flow: int) -> None:
        keys, size_bytes = sizes[flow][asked[flow] % len(sizes[flow])]
        queue.put(flow, None, keys, size_bytes, 0.0)
        asked[flow] += 1

    for flow in range(len(weights)):
        put(flow)
        put(flow)
    served = [0.0] * len(weights)
    for _ in range(300):
        queued = queue.next(0.0)
        assert queued is not None
        served[queued.flow] += queued.cost
        put(queued.flow)
        queue.check()
        # Goyal et al., theorem 1: the difference is at most one request of each
        largest = [max(k * KEY_COST_BYTES + b for k, b in of_flow) for of_flow in sizes]
        for a in range(len(weights)):
            for b in range(a):
                bound = largest[a] / weights[a] + largest[b] / weights[b]
                assert abs(served[a] / weights[a] - served[b] / weights[b]) <= bound * (1 + 1e-9)


@settings(max_examples=examples(200), deadline=None)
@given(
    st.floats(1.0, 1000.0),
    st.floats(1e3, 1e7),
    st.lists(st.tuples(st.floats(0.0, 0.7), st.integers(1, 64), st.integers(0, 1 << 20)), max_size=60),
)
def test_a_namespace_never_exceeds_its_rate_by_more_than_the_burst_or_one_request(
    operations_s: float, bytes_s: float, steps: list[tuple[float, int, int]]
) -> None:
    queue = queue_of(f1=(1.0, operations_s, bytes_s))
    now_s = 0.0
    went: list[tuple[float, int, int]] = []
    for pause_s, keys, size_bytes in steps:
        now_s += pause_s
        if queue.admit(1, keys, size_bytes, now_s):
            went.append((now_s, keys, size_bytes))
        else:
            queue.put(1, None, keys, size_bytes, now_s)
        while (queued := queue.next(now_s)) is not None:
            went.append((now_s, queued.keys, queued.size_bytes))
        queue.check()
    for place, rate in ((1, operations_s), (2, bytes_s)):
        amounts = [(at[0], at[place]) for at in went]
        for first in range(len(amounts)):
            total, largest = 0.0, 0.0
            for at_s, amount in amounts[first:]:
                total += amount
                largest = max(largest, amount)
                allowed = rate * (at_s - amounts[first][0]) + max(rate * BURST_S, largest)
                # a large request waits for a full bucket: what follows it may be one more burst, never two
                assert total <= allowed * (1 + 1e-9) + 1e-6


def test_what_was_used_while_nobody_waited_is_not_paid_for_later() -> None:
    queue = queue_of(f1=(1.0, 0.0, 0.0), f2=(1.0, 0.0, 0.0))
    for _ in range(1000):
        queue.put(1, None, 100, 1 << 20, 0.0)
    while queue.next(0.0):
        pass
    for _ in range(20):
        queue.put(1, None, 1, 0, 0.0)
        queue.put(2, None, 1, 0, 0.0)
    first = Counter(queued.flow for _ in range(20) if (queued := queue.next(0.0)))
    assert first == {1: 10, 2: 10}


def test_what_waits_is_bounded_in_keys_of_a_flow_and_of_all() -> None:
    queue: FairQueue[object] = FairQueue(256, max_keys=100, max_keys_of_all=150)
    assert queue.put(1, None, 60, 0, 0.0)
    assert not queue.put(1, None, 60, 0, 0.0), "the flow has more keys than may wait"
    assert not queue.put(2, None, 40, 0, 0.0), "all flows have"
    assert not queue.has_room(1)
    assert not queue.has_room(2)
    assert queue.has_room(3), "it has nothing that will be served and make room"
    served = [queue.next(0.0) for _ in range(3)]
    assert all(served)
    assert queue.waiting_keys == 0
    for end in (lambda: queue.remove(lambda _: True), lambda: queue.expired(MAX_QUEUED_S + 1)):
        queue.put(1, None, 60, 0, 0.0)
        assert len(end()) == 1
        queue.check()
        assert queue.waiting_keys == 0
        assert queue.has_room(1)
