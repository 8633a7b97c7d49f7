from __future__ import annotations

import pytest

from pdserve.errors import FrameError
from pdserve.kvpool.namespaces import (
    MAX_GEOMETRY_CHARS,
    MAX_NAME_CHARS,
    MAX_NAMESPACES,
    NamespaceError,
    Namespaces,
)


def test_numbers_survive_a_restart_and_are_never_reused() -> None:
    first = Namespaces()
    a, _ = first.open("a", {"dtype": "bf16"})
    b, is_new = first.open("b", {})
    assert is_new
    first.drop("b")
    again = Namespaces.load(first.dump())
    assert again.open("a", {"dtype": "bf16"}) == (a, False)
    assert again.open("b", {})[0].number > b.number
    assert Namespaces.load(again.dump()).numbers == again.numbers


@pytest.mark.parametrize("text", ["", "{", "[]", '{"next_number":1}', '{"next_number":"x","namespaces":[]}'])
def test_a_damaged_file_is_refused(text: str) -> None:
    with pytest.raises(FrameError):
        Namespaces.load(text)


def test_a_file_whose_counter_is_behind_does_not_reuse_numbers() -> None:
    text = '{"next_number":1,"namespaces":[{"number":7,"name":"a","geometry":{}}]}'
    assert Namespaces.load(text).open("b", {})[0].number == 8


def test_names_geometry_and_number_of_namespaces_are_bounded() -> None:
    namespaces = Namespaces()
    for name, geometry in (
        ("", {}),
        ("x" * (MAX_NAME_CHARS + 1), {}),
        ("x", {"k": "v" * MAX_GEOMETRY_CHARS}),
    ):
        with pytest.raises(NamespaceError) as error:
            namespaces.open(name, geometry)
        assert error.value.code == "bad_namespace"
    for i in range(MAX_NAMESPACES):
        namespaces.open(f"n{i}", {})
    with pytest.raises(NamespaceError, match="drop one"):
        namespaces.open("one more", {})
    assert not namespaces.open("n0", {})[1]


def test_dropping_what_is_not_there_is_nothing() -> None:
    assert Namespaces().drop("x") is None
