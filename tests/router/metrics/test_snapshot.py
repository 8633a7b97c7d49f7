"""Metrics as a value: added up over processes, sent between them, shown in Prometheus' text form."""

from __future__ import annotations

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from pdserve.metric import Definition, Labels
from pdserve.router.metrics.exposition import exposition
from pdserve.router.metrics.stats import (
    BUCKETS_S,
    BY_NAME,
    METRICS,
    STATES,
    Histogram,
    Snapshot,
    Stats,
    add_up,
    left_behind,
)

COUNTED = [one for one in METRICS if one.kind != "histogram"]


def labels_of(definition: Definition) -> st.SearchStrategy[Labels]:
    return st.tuples(*(st.sampled_from(["a", 'b"\n\\', ""]) for _ in definition.labels))


def histogram_of(observed_s: list[float]) -> Histogram:
    histogram = Histogram()
    for value_s in observed_s:
        histogram.observe(value_s)
    return histogram


SNAPSHOTS = st.builds(
    Snapshot,
    st.fixed_dictionaries(
        {},
        optional={
            one.name: st.dictionaries(labels_of(one), st.integers(0, 9), max_size=3) for one in COUNTED
        },
    ),
    st.fixed_dictionaries(
        {},
        optional={
            one.name: st.dictionaries(
                labels_of(one),
                st.lists(st.sampled_from([0.0, 0.003, 1.0, 1e6])).map(histogram_of),
                max_size=2,
            )
            for one in METRICS
            if one.kind == "histogram"
        },
    ),
)


@settings(max_examples=50)
@given(st.lists(SNAPSHOTS, max_size=3))
def test_amounts_add_up_and_of_states_the_largest_counts(snapshots: list[Snapshot]) -> None:
    total = add_up(snapshots)
    for name in {name for one in snapshots for name in one.values}:
        for labels in {key for one in snapshots for key in one.values.get(name, {})}:
            values = [one.values.get(name, {}).get(labels, 0) for one in snapshots]
            assert total.values[name][labels] == (max(values) if name in STATES else sum(values))
    for name in {name for one in snapshots for name in one.histograms}:
        for labels, histogram in total.histograms[name].items():
            of = [one.histograms[name][labels] for one in snapshots if labels in one.histograms.get(name, {})]
            assert histogram.counts == [
                sum(counts) for counts in zip(*(one.counts for one in of), strict=True)
            ]
            assert histogram.sum_s == sum(one.sum_s for one in of)


@settings(max_examples=50)
@given(SNAPSHOTS)
def test_a_process_that_ended_leaves_what_it_counted_and_no_state(snapshot: Snapshot) -> None:
    left = left_behind(snapshot)
    assert set(left.values) == {name for name in snapshot.values if BY_NAME[name].kind == "counter"}
    assert left.histograms == snapshot.histograms


@settings(max_examples=50)
@given(SNAPSHOTS)
def test_the_text_form_after_a_channel_has_every_metric_with_its_values(snapshot: Snapshot) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(snapshot), type=Snapshot) == snapshot
    families = {one.name: one for one in text_string_to_metric_families(exposition(snapshot).decode())}
    assert [one.name for one in families.values()] == [one.family_name for one in METRICS]
    for definition in METRICS:
        family = families[definition.family_name]
        assert family.type == definition.kind
        shown = {
            (
                sample.name,
                *(sample.labels[label] for label in definition.labels),
                *_bound(sample.labels),
            ): sample.value
            for sample in family.samples
        }
        expected = {
            (definition.full_name, *labels): value
            for labels, value in snapshot.values.get(definition.name, {}).items()
        }
        for labels, histogram in snapshot.histograms.get(definition.name, {}).items():
            below = 0
            for bound, count in zip((*map(str, BUCKETS_S), "+Inf"), histogram.counts, strict=True):
                below += count
                expected[f"{definition.family_name}_bucket", *labels, bound] = below
            expected[f"{definition.family_name}_count", *labels] = below
            expected[f"{definition.family_name}_sum", *labels] = histogram.sum_s
        assert shown == expected


def test_answers_counted_in_lots_are_those_that_were_added() -> None:
    stats, chat = Stats(), "/v1/chat/completions"
    stats.answers[chat, 200, "m", True, True, ("decode", "router")] += [
        (10.0, 10.25, 12.25, 5, 0.2, 0.05),
        (10.0, 11.0, 11.0, 1, 0.5, 0.5),
    ]
    stats.answers[chat, 200, "m", True, False, ("decode", "router")].append((0.0, 1.0, 2.0, 9, 1.0, 0.0))
    stats.answers[chat, 200, "m", False, True, ("prefill",)].append((0.0, 3.0, 3.0, 7, 1.0))
    stats.answers[chat, 503, "m", False, True, ()].append((0.0, 4.0, 4.0, 0))
    stats.answers["/tokenize", 200, "m", False, True, ()].append((0.0, 4.0, 4.0, 0))
    for _ in range(2):  # what was counted is not counted again
        found = stats.snapshot()
        assert found.values["requests"] == {
            (chat, "200"): 4,
            (chat, "503"): 1,
            ("/tokenize", "200"): 1,
        }
        assert found.histograms["time_to_first_byte_seconds"][chat,] == histogram_of([0.25, 1, 1, 3, 4])
        assert found.histograms["first_token_seconds"]["decode",] == histogram_of([0.2, 0.5, 1])
        assert set(found.histograms["first_token_seconds"]) == {("decode",), ("router",)}
        assert found.histograms["model_request_seconds"]["m",] == histogram_of([2.25, 1, 3])
        assert found.histograms["model_first_token_seconds"]["m",] == histogram_of([0.25, 1])
        assert found.histograms["model_inter_token_seconds"]["m",] == histogram_of([0.5])


def _bound(labels: dict[str, str]) -> list[str]:
    return [labels["le"]] if "le" in labels else []
