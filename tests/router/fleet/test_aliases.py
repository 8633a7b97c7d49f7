"""Which model an alias means: shares, stickiness, and hostile weights. Pure."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.errors import ConfigError
from pdserve.router.config.aliases import Alias
from pdserve.router.config.router import RouterConfig
from pdserve.router.fleet.aliases import Aliases
from pdserve.settings.config_file import load_config

KEYS = [f"conversation {i}" for i in range(4000)]
BOTH = {"a": "a", "b": "b"}


def chosen(weights: dict[str, float], ready: dict[str, str] = BOTH, last: str = "") -> list[str]:
    aliases = Aliases([Alias(name="x", models=weights)])
    return [aliases.choose("x", key, ready, last) for key in KEYS]


def test_each_model_gets_its_share_of_the_conversations() -> None:
    assert Counter(chosen({"a": 90, "b": 10}))["b"] == pytest.approx(400, rel=0.15)
    assert Counter(chosen({"a": 0.5, "b": 0.5}))["b"] == pytest.approx(2000, rel=0.1)


def test_a_larger_share_takes_conversations_over_and_gives_none_away() -> None:
    before, after = chosen({"a": 90, "b": 10}), chosen({"a": 80, "b": 20})
    assert {(was, now) for was, now in zip(before, after, strict=True) if was != now} == {("a", "b")}


@given(st.dictionaries(st.sampled_from("abcdef"), st.floats(0, 1e9), min_size=1), st.text())
def test_a_model_without_weight_is_never_chosen(weights: dict[str, float], key: str) -> None:
    if not any(weights.values()):
        weights["a"] = 1e-300
    aliases = Aliases([Alias(name="x", models=weights)])
    for last in ("", *weights):
        assert weights[aliases.choose("x", key, {name: name for name in weights}, last)] > 0


def test_a_conversation_keeps_its_model_unless_that_cannot_answer_or_is_switched_off() -> None:
    assert set(chosen({"a": 99, "b": 1}, last="b")) == {"b"}
    assert set(chosen({"a": 99, "b": 1}, {"a": "a"}, last="b")) == {"a"}
    assert set(chosen({"a": 99, "b": 0}, last="b")) == {"a"}


def test_where_no_model_can_answer_one_of_them_is_named_all_the_same() -> None:
    assert set(chosen({"a": 1, "b": 1}, {})) == {"a", "b"}


def test_of_two_adapters_of_one_model_the_conversation_alone_decides() -> None:
    ready = {"m:one": "m", "m:two": "m"}
    weights = {"m:one": 1.0, "m:two": 1.0}
    assert chosen(weights, ready, last="m") == chosen(weights, ready)


def test_requests_that_name_no_model_may_mean_an_alias() -> None:
    aliases = Aliases([Alias(name="x", models={"a": 1})], default="x")
    assert [aliases.named(name) for name in ("x", "a", None, "", "default")] == ["x", None, "x", "x", "x"]
    assert Aliases([Alias(name="x", models={"a": 1})]).named(None) is None


@pytest.mark.parametrize(
    ("aliases", "said"),
    [
        ([{"name": "x", "models": {"a": float("nan")}}], "weight of 'a' is nan"),
        ([{"name": "x", "models": {"a": float("inf")}}], "weight of 'a' is inf"),
        ([{"name": "x", "models": {"a": -1}}], "weight of 'a' is -1"),
        ([{"name": "x", "models": {"a": 0}}], "no model of a weight above 0"),
        ([{"name": "x", "models": {}}], "no model of a weight above 0"),
        ([{"name": "x", "models": {"": 1}}], "weight of ''"),
        ([{"name": "", "models": {"a": 1}}], "name"),
        ([{"name": "x", "models": {"a": 1}}, {"name": "x", "models": {"b": 1}}], "listed twice"),
        ([{"name": "x", "models": {"y": 1}}, {"name": "y", "models": {"a": 1}}], "is an alias itself"),
        ([{"name": "x", "models": {"c": 1}}], "none of 'models'"),
    ],
)
def test_weights_and_names_that_cannot_be_meant_are_refused(aliases: list[Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config(RouterConfig, None, {"models": ["a", "b"], "aliases": aliases})


def test_an_alias_may_have_the_name_of_one_of_its_models() -> None:
    config = RouterConfig(models=("a", "b"), aliases=(Alias(name="a", models={"a": 9, "b": 1}),))
    assert msgspec.structs.replace(config, default_model="a").default_model == "a"
    assert RouterConfig(models=("a",), aliases=(Alias(name="x", models={"a:l": 1}),), default_model="x")
