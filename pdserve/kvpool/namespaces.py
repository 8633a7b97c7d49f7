"""The namespaces of a node: names, numbers, geometry. Pure; `dump` and `load` are its persistent form.

A namespace says everything about its pages that their keys do not: model, revision, dtypes, page size,
layout, geometry. Workers may share pages only when they agree on all of it, so a second opening with another
geometry is refused, by the name of the field. Numbers are never reused, not even after a restart: a row of
the slot table that names a dropped namespace belongs to nobody.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from pdserve.errors import FrameError, PoolRefused

MAX_NAMESPACES = 1024
MAX_NAME_CHARS = 512
MAX_GEOMETRY_CHARS = 64 * 1024  # keys and values together


class Namespace(msgspec.Struct, frozen=True):
    """One namespace, as persisted."""

    number: int
    name: str
    geometry: dict[str, str]


class NamespaceFile(msgspec.Struct, frozen=True):
    """The persistent form."""

    next_number: int
    namespaces: list[Namespace]


class NamespaceError(PoolRefused):
    """`code` and one line for a Fault."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Namespaces:
    """Names to numbers. `next_number` only grows."""

    def __init__(self) -> None:
        self._next_number = 1
        self._by_name: dict[str, Namespace] = {}
        self._by_number: dict[int, Namespace] = {}

    @classmethod
    def load(cls, text: str | bytes) -> Namespaces:
        """From `dump`'s text. Raises FrameError when it is not that."""
        try:
            stored = msgspec.json.decode(text, type=NamespaceFile)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise FrameError(f"not a list of namespaces: {error}") from error
        found = cls()
        for namespace in stored.namespaces:
            found._add(namespace)
        found._next_number = max([stored.next_number, *(number + 1 for number in found._by_number)])
        return found

    def dump(self) -> str:
        """JSON of everything that must outlive the process."""
        return msgspec.json.encode(NamespaceFile(self._next_number, list(self))).decode()

    def open(self, name: str, geometry: Mapping[str, str]) -> tuple[Namespace, bool]:
        """The namespace, and whether it is new. Raises NamespaceError."""
        existing = self._by_name.get(name)
        if existing is not None:
            _check_same(existing, geometry)
            return existing, False
        if len(self._by_name) >= MAX_NAMESPACES:
            raise NamespaceError(
                "too_many_namespaces",
                f"the node holds {MAX_NAMESPACES} namespaces: drop one that is not used",
            )
        size = sum(len(key) + len(value) for key, value in geometry.items())
        if not 0 < len(name) <= MAX_NAME_CHARS or size > MAX_GEOMETRY_CHARS:
            raise NamespaceError(
                "bad_namespace",
                f"a namespace's name must have 1 to {MAX_NAME_CHARS} characters, its geometry at most "
                f"{MAX_GEOMETRY_CHARS}",
            )
        namespace = Namespace(self._next_number, name, dict(geometry))
        self._next_number += 1
        self._add(namespace)
        return namespace, True

    def drop(self, name: str) -> Namespace | None:
        """Forget the namespace; what it was, or None."""
        namespace = self._by_name.pop(name, None)
        if namespace is not None:
            del self._by_number[namespace.number]
        return namespace

    def find(self, name: str) -> Namespace | None:
        """The namespace of this name, or None."""
        return self._by_name.get(name)

    def __getitem__(self, number: int) -> Namespace:
        return self._by_number[number]

    def __contains__(self, number: int) -> bool:
        return number in self._by_number

    def __iter__(self) -> Iterator[Namespace]:
        return iter(self._by_name.values())

    @property
    def numbers(self) -> list[int]:
        """Of all namespaces."""
        return list(self._by_number)

    def _add(self, namespace: Namespace) -> None:
        self._by_name[namespace.name] = namespace
        self._by_number[namespace.number] = namespace


def _check_same(existing: Namespace, geometry: Mapping[str, str]) -> None:
    for key in sorted({*existing.geometry, *geometry}):
        theirs, ours = existing.geometry.get(key, "(absent)"), geometry.get(key, "(absent)")
        if theirs != ours:
            raise NamespaceError(
                "geometry_mismatch",
                f"namespace '{existing.name}' has {key} = {theirs}, this client has {key} = {ours}: "
                "give the client the same setting, or a namespace of its own",
            )
