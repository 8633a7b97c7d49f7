"""TOML text reads back as the tables that it was written from."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.settings.config_file import to_toml

scalars = st.one_of(
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    st.text(st.characters(exclude_categories=["Cs"])),
)
keys = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(keys, values, max_size=4))
def test_toml_text_reads_back_as_what_was_written(tables: dict[str, Any]) -> None:
    assert tomllib.loads(to_toml(tables)) == tables


def test_toml_leaves_out_none_and_refuses_what_it_cannot_say() -> None:
    assert tomllib.loads(to_toml({"a": None, "b": Path("/x"), "c": [{"d": None, "e": 1}]})) == {
        "b": "/x",
        "c": [{"e": 1}],
    }
    with pytest.raises(TypeError):
        to_toml({"a": object()})
