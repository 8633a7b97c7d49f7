"""Hypothesis strategies for messages of the protocol with odd values in every field."""

from __future__ import annotations

import types
import typing
from typing import Any, get_args, get_origin

import msgspec
from hypothesis import strategies as st

from tests.support.kvpool.node_model import KIB, key

INTS = st.one_of(
    st.integers(-2, 70),  # slots, sequences, namespace numbers and ids that mean something here
    st.sampled_from([-(2**63), -1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1, 4 * KIB, 64 * KIB, 1 << 40]),
)


TEXTS = st.sampled_from(["", "a", "b", "mine", "x" * 600, "a\nb", "..", "a b", "ä", "\0", "lru", "dram"])


KEYS = st.one_of(
    st.integers(0, 9).map(key), st.integers(20, 24).map(key), st.binary(min_size=32, max_size=32)
)


PLAIN: dict[Any, st.SearchStrategy[Any]] = {
    int: INTS,
    str: TEXTS,
    bytes: KEYS,
    bool: st.booleans(),
    float: st.one_of(st.floats(), st.sampled_from([0.0, -1.0, 1e308, 1e-9])),
    type(None): st.none(),
}


def of_type(annotation: Any) -> st.SearchStrategy[Any]:
    """Values of a message field's type, odd ones among them."""
    if annotation in PLAIN:
        return PLAIN[annotation]
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is list:
        return st.lists(of_type(arguments[0]), max_size=6)
    if origin is dict:
        return st.dictionaries(of_type(arguments[0]), of_type(arguments[1]), max_size=3)
    if origin is tuple:
        return st.tuples(*map(of_type, arguments))
    if origin is typing.Literal:
        return st.sampled_from(arguments)
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*map(of_type, arguments))
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        return message_of(annotation)
    raise AssertionError(f"no values for {annotation}")


def message_of(kind: type[Any]) -> st.SearchStrategy[Any]:
    hints = typing.get_type_hints(kind)
    return st.builds(kind, **{name: of_type(hints[name]) for name in kind.__struct_fields__})
